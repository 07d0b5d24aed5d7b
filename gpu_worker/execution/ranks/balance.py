"""Which experts to have in which places, so that the tokens that were counted fall on all ranks alike.

Few places change at a time: whoever reads weights has little to read, and what comes next may be another load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]

_LEAST_GAIN = 2e-3
"""Of the sum of the squares of ranks' loads, what a change has to save."""


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
