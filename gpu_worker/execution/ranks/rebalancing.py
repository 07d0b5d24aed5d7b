"""Rank 0 moves experts between ranks, by the tokens that it counts, while steps are computed.

A thread looks at the counters after a number of steps. A layer after the other, few experts at a time, all ranks read
from their files what they will need, beside steps; between two steps all of them then change to the new places.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_worker.execution.ranks.balance import Loads, better_places, rank_loads
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.messages import MoveExperts, PrepareExperts, encode
from gpu_worker.execution.ranks.replies import RankLostError
from gpu_worker.layers.expert_loads import ExpertLoads
from gpu_worker.layers.placed_experts import PlacedExperts

MAX_CHANGES = 4
"""Experts of a layer that move at a time: what the memory beside the weights has to hold."""

_log = logging.getLogger(__name__)


class _Move(NamedTuple):
    number: int
    layer: int
    places: tuple[int, ...]
    prepared: Mapping[int, Any]


class Rebalancing:
    """One thread decides and prepares; the thread that submits steps calls `before_step`.

    Attributes:
        num_moved: Places that have got another expert.
    """

    def __init__(self, group: RankGroup, layers: Sequence[PlacedExperts], loads: ExpertLoads, interval: int) -> None:
        self.num_moved = 0
        self._group = group
        self._layers = layers
        self._loads = loads
        self._interval = interval
        self._num_steps = 0
        self._before = self._tokens()
        self._ready: _Move | None = None
        self._has_moved = threading.Event()
        self._thread: threading.Thread | None = None

    def before_step(self) -> None:
        """Let all ranks change to places that they are ready for, and look at the counters now and then.

        Raises:
            Exception: This rank cannot change.
        """
        if self._ready is not None:
            self._change(self._ready)
        self._num_steps += 1
        if self._num_steps >= self._interval and (self._thread is None or not self._thread.is_alive()):
            self._num_steps = 0
            self._thread = threading.Thread(target=self._rebalance, name="rebalancing", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Give up a move that not all ranks have made ready, because the group is lost; no step may be submitted."""
        if self._thread is not None:
            self._has_moved.set()
            self._thread.join()
        self._ready = None

    def _change(self, move: _Move) -> None:
        self._ready = None
        layer = self._layers[move.layer]
        self._group.send([encode(MoveExperts(move.number))])
        before = layer.places
        layer.adopt(move.places, move.prepared)
        self.num_moved += sum(one != other for one, other in zip(before, move.places, strict=True))
        self._has_moved.set()

    def _tokens(self) -> list[Loads]:
        return [layer.double().numpy() for layer in self._loads.by_layer()]

    def _rebalance(self) -> None:
        counted = self._tokens()
        tokens = [now - before for now, before in zip(counted, self._before, strict=True)]
        self._before, before = counted, self._share(tokens)
        try:
            num_layers = sum(self._rebalance_layer(layer, own) for layer, own in enumerate(tokens))
        except RankLostError:
            return
        except Exception:
            _log.exception("experts stay where they are")
            return
        if num_layers:
            shares = {"before": round(before, 3), "after": round(self._share(tokens), 3)}
            _log.info("experts were moved: share of the busiest rank", extra={"layers": num_layers, **shares})

    def _share(self, tokens: Sequence[Loads]) -> float:
        """Return the share of tokens of the busiest rank of each layer, over all layers."""
        loads = [
            rank_loads(layer.places, own, self._group.size) for layer, own in zip(self._layers, tokens, strict=True)
        ]
        return float(sum(own.max() for own in loads) / max(1.0, sum(own.sum() for own in loads)))

    def _rebalance_layer(self, layer: int, tokens: Loads) -> bool:
        """Return whether experts of a layer have moved.

        Raises:
            RankLostError: The group is lost meanwhile.
            Exception: A rank cannot read an expert.
        """
        experts = self._layers[layer]
        places = better_places(experts.places, tokens, self._group.size, MAX_CHANGES)
        if places == experts.places:
            return False
        number = self._group.tasks.new_number()
        self._has_moved.clear()
        self._group.tasks.do(number, [encode(PrepareExperts(number, layer, places))])
        self._ready = _Move(number, layer, places, experts.prepare(places))
        while not self._has_moved.wait(TICK_S):
            self._group.check()
        # It may have been given up.
        self._group.check()
        return True
