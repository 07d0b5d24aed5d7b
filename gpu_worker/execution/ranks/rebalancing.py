"""Rank 0 moves experts between ranks, by the tokens that it counts, while steps are computed.

A thread looks at the counters after a number of steps. A layer after the other, few experts at a time, all ranks read
from their files what they will need, beside steps; between two steps all of them then change to the new places. Few
places change at a time: ranks then read few weights, and the load may change before the next move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.messages import MoveExperts, PrepareExperts, encode
from gpu_worker.execution.ranks.replies import RankLostError
from gpu_worker.layers.mixture import ExpertLoads
from gpu_worker.layers.ranks.experts import PlacedExperts

Loads = npt.NDArray[np.float64]

MAX_CHANGES = 4
"""Experts of a layer that move at a time: what the memory beside the weights has to hold."""
_LEAST_GAIN = 2e-3
"""Of the sum of the squares of ranks' loads, what a change has to save."""

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
        """Let all ranks change to places that they are ready for, if they can; look at the counters now and then."""
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


def rank_loads(places: Sequence[int], tokens: Loads, size: int) -> Loads:
    """Return the tokens of each of `size` ranks: those of an expert fall on all of its places alike.

    Args:
        places: The expert in each place of all ranks, as many on each.
        tokens: Of each expert.
        size: How many ranks there are.
    """
    own = np.asarray(places)
    return np.asarray((tokens / np.bincount(own, minlength=len(tokens)))[own].reshape(size, -1).sum(1))


def better_places(places: Sequence[int], tokens: Loads, size: int, max_changes: int) -> tuple[int, ...]:
    """Return places that balance ranks better, of which at most `max_changes` have another expert.

    Each change takes load from the busiest rank: another rank has one of its experts too, in place of one that is
    elsewhere as well, or exchanges an expert with it. Every expert stays in some place, and in one at most of a rank.
    """
    own, left = np.asarray(places).reshape(size, -1).copy(), max_changes
    while left > 0 and (changes := _best_changes(own, tokens, is_exchange_allowed=left > 1)):
        for rank, place, expert in changes:
            own[rank, place] = expert
        left -= len(changes)
    return tuple(own.flatten().tolist())


def _best_changes(
    places: npt.NDArray[np.int64], tokens: Loads, *, is_exchange_allowed: bool
) -> list[tuple[int, int, int]]:
    """Return the rank, place and new expert of what saves most with the idlest rank that can help; nothing if none."""
    size = len(places)
    loads = rank_loads(places.flatten().tolist(), tokens, size)
    counts = np.bincount(places.flatten(), minlength=len(tokens))
    has = np.stack([np.bincount(own, minlength=len(tokens)) for own in places], axis=1)
    busiest, most = int(loads.argmax()), float(np.square(loads).sum()) * (1 - _LEAST_GAIN)
    unit = np.eye(size)
    for other in map(int, loads.argsort()[:-1]):
        ours, theirs = places[busiest], places[other]
        one, few = tokens[ours, None], tokens[theirs, None]
        num_ours, num_theirs = counts[ours, None], counts[theirs, None]
        # What ranks get when theirs has a copy of ours, and gives up one of its own; `maximum` where none is left.
        fewer = np.maximum(num_theirs - 1, 1)
        copied = has[ours] * (one / (num_ours + 1) - one / num_ours) + unit[other] * one / (num_ours + 1)
        dropped = has[theirs] * (few / fewer - few / num_theirs) - unit[other] * few / fewer
        exchange = (unit[other] - unit[busiest]) * one / num_ours, (unit[busiest] - unit[other]) * few / num_theirs
        is_new = ~np.isin(ours, theirs)[:, None]
        can_copy = is_new & (num_theirs > 1).T
        can_exchange = is_new & ~np.isin(theirs, ours)[None, :] & is_exchange_allowed
        totals = [
            np.where(allowed, np.square(loads + gets[:, None] + gives[None, :]).sum(2), np.inf)
            for allowed, gets, gives in ((can_copy, copied, dropped), (can_exchange, *exchange))
        ]
        kind = int(totals[1].min() < totals[0].min())
        if totals[kind].min() < most:
            first, second = np.unravel_index(int(totals[kind].argmin()), totals[kind].shape)
            changes = [(other, int(second), int(ours[first]))]
            return changes + ([(busiest, int(first), int(theirs[second]))] if kind else [])
    return []
