"""Experts of which each rank has some, which move between ranks, and of which busy ones are on several.

A *place* is room for the weights of one expert at one rank; places are numbered over all ranks, as many on each. Every
rank knows which expert each place has, so all of them compute the same places of a step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.layers.ranks import Ranks, SummedExperts
from gpu_worker.layers.stored_matrix import whole
from kernels.moe import ExpertWeights, ReplaceableExperts


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShare:
    """What a rank has of a layer's experts.

    Attributes:
        places: The expert in each place of all ranks, in the beginning.
        rows: `[num_features]` int64, which features of an expert's first projection it has; None is all.
        columns: Which inputs of the last projection; None is all.
        stored: Both projections of all experts in the checkpoint, where experts move; else None.
    """

    num_experts: int
    places: tuple[int, ...]
    own: range
    rows: torch.Tensor | None = None
    columns: range | None = None
    stored: tuple[ExpertWeights, ExpertWeights] | None = None

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that this rank has."""
        return self.places[self.own.start : self.own.stop]


def weights_of(experts: ExpertWeights, chosen: Sequence[int]) -> ExpertWeights:
    """Return the weights of some experts, read where they are still stored."""
    bias = None if experts.bias is None else experts.bias[list(chosen)]
    return ExpertWeights(tuple(whole(experts.forms[expert]) for expert in chosen), bias)


class PlacedExperts(SummedExperts):
    """Gives each token to one of the places that have its expert, by turns.

    Attributes:
        places: The expert in each place of all ranks; the same on each between two steps.
    """

    def __init__(self, experts: ReplaceableExperts, ranks: Ranks, share: ExpertShare) -> None:
        super().__init__(experts, ranks, share.num_experts)
        assert share.stored is not None
        self._replaceable = experts
        self._stored = share.stored
        self._own = share.own
        # Places whose weights may be of any expert, because a change has failed.
        self._torn: set[int] = set()
        device = experts.tokens_per_expert.device
        self._places = torch.zeros(share.num_experts, ranks.size, dtype=torch.int32, device=device)
        self._num_places = torch.ones(share.num_experts, dtype=torch.int64, device=device)
        self.adopt(share.places, {})

    def prepare(self, places: Sequence[int]) -> Mapping[int, Any]:
        """Read the experts that are new at this rank; any thread may do so, one at a time.

        Returns:
            What `adopt` takes.

        Raises:
            Exception: One cannot be read, or there is no memory for it.
        """
        new = [place for place in self._own if places[place] != self.places[place]]
        return {place - self._own.start: self._prepare(places[place]) for place in new}

    def adopt(self, places: Sequence[int], prepared: Mapping[int, Any]) -> None:
        """Have other experts in some places from the next step on; all ranks do so between the same two steps.

        Raises:
            Exception: They could not be written: `restore`, before anything is computed.
        """
        self._torn |= prepared.keys()
        found: list[list[int]] = [[] for _ in self._num_places]
        for place, expert in enumerate(places):
            found[expert].append(place)
        with torch.inference_mode():
            for place, expert in prepared.items():
                self._replaceable.replace(place, expert)
            size = self._places.shape[1]
            self._places.copy_(torch.tensor([(own * size)[:size] for own in found], dtype=torch.int32))
            self._num_places.copy_(torch.tensor([len(own) for own in found]))
        self.places = tuple(places)
        self._torn -= prepared.keys()

    def restore(self, places: Sequence[int]) -> None:
        """Read experts that are new here or partly written, while nothing is computed; raise errors of reading."""
        self._torn |= {place - self._own.start for place in self._own if places[place] != self.places[place]}
        with torch.inference_mode():
            for place in sorted(self._torn):
                self._replaceable.replace(place, self._prepare(places[place + self._own.start]))
        self.adopt(places, {})
        self._torn.clear()

    def _prepare(self, expert: int) -> Any:
        gate_up, down = self._stored
        return self._replaceable.prepare(weights_of(gate_up, [expert]), weights_of(down, [expert]))

    def _placed(self, ids: torch.Tensor) -> torch.Tensor:
        chosen = ids.long().clamp(min=0)
        turns = torch.arange(len(ids), device=ids.device)[:, None] % self._num_places[chosen]
        return torch.where(ids < 0, ids, self._places[chosen, turns])


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens on experts since the model was loaded.

    Attributes:
        tokens: Times that an expert was given a token, over all layers.
        imbalance: The most that an expert got over the mean of its layer, in the layer where that is most; 0 before
            the first token.
        unused: Experts, over all layers, that no token went to.
    """

    tokens: int
    imbalance: float
    unused: int


class ExpertLoads:
    """Reads the counters of a model's mixtures; any thread may do so while steps are computed. It waits for a GPU."""

    def __init__(self, tokens_per_expert: Sequence[torch.Tensor]) -> None:
        self._counters = tuple(tokens_per_expert)
        self._sizes = [len(counter) for counter in self._counters]
        device = self._counters[0].device
        # A stream of its own, because that of the model has steps before and behind whatever is put into it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def by_layer(self) -> list[torch.Tensor]:
        """Return the tokens that each expert got since the model was loaded, `[num_experts]` int64 a layer."""
        with torch.cuda.stream(self._stream):
            # One copy from the device, however many layers there are.
            return list(torch.cat(self._counters).cpu().split_with_sizes(self._sizes))

    def read(self) -> ExpertLoad:
        """Return the numbers of this moment."""
        counts = [counter.double() for counter in self.by_layer()]
        busiest = [float(layer.max() / layer.mean()) for layer in counts if layer.any()]
        unused = sum(int((layer == 0).sum()) for layer in counts)
        return ExpertLoad(int(sum(float(layer.sum()) for layer in counts)), max(busiest, default=0.0), unused)
