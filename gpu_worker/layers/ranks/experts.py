"""Experts of which each rank has some, which move between ranks, and of which busy ones are on several.

A *place* is room for the weights of one expert at one rank; places are numbered over all ranks, as many on each. Every
rank knows which expert each place has, so all of them compute the same places of a step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpu_worker.layers.adapters import ExpertShare
from gpu_worker.layers.ranks.rank import Ranks
from gpu_worker.layers.stored_matrix import whole
from kernels.low_rank import AdapterRows
from kernels.moe import Experts, ExpertWeights, ReplaceableExperts


def weights_of(experts: ExpertWeights, chosen: Sequence[int]) -> ExpertWeights:
    """Return the weights of some experts, read where they are still stored."""
    bias = None if experts.bias is None else experts.bias[list(chosen)]
    return ExpertWeights(tuple(whole(experts.forms[expert]) for expert in chosen), bias)


class SummedExperts:
    """Experts of which each rank has some, or some features of each: their results are summed."""

    def __init__(self, experts: Experts, ranks: Ranks, num_experts: int) -> None:
        self._experts = experts
        self._ranks = ranks
        own = experts.tokens_per_expert
        # Who has some experts counts the tokens of those alone.
        self._counted = own.new_zeros(num_experts) if ranks.has_whole_experts else None
        self.tokens_per_expert = own if self._counted is None else self._counted

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: AdapterRows | None = None
    ) -> torch.Tensor:
        """Do what `Experts` promises."""
        if self._counted is not None:
            chosen = ids.flatten().long()
            self._counted.index_add_(0, chosen.clamp(min=0), (chosen >= 0).to(self._counted.dtype))
        return self._ranks.sum(self._experts(x, self._placed(ids), weights, adapters))

    def _placed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of experts, among those of all ranks, that compute each token."""
        return ids


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
