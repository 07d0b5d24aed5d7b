"""The figures of a run by room, and whether each room reached the goal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ops.mutation.judge import Verdict

GOAL = 0.9
# Mutants whose tests ran out of time say nothing: with more of them the rate is of the easy ones.
MAX_UNFINISHED = 0.1
_WITHOUT_EFFECT = (Verdict.CRASHED, Verdict.EQUIVALENT)


def share_noticed(counts: Counter[Verdict]) -> float | None:
    """Return the share of the judged mutants that tests or mypy noticed; None if no mutant was judged."""
    num_judged = _num_with_effect(counts) - counts[Verdict.UNFINISHED]
    return 1 - counts[Verdict.SURVIVED] / num_judged if num_judged else None


def share_unfinished(counts: Counter[Verdict]) -> float:
    """Return the share of the mutants with an effect whose tests ran out of time; 0 if there is no such mutant."""
    return counts[Verdict.UNFINISHED] / max(1, _num_with_effect(counts))


def is_goal_reached(counts: Counter[Verdict]) -> bool:
    """Whether a room's tests noticed enough of its mutants, and came to their end with nearly all of them."""
    share = share_noticed(counts)
    return (share is None or share >= GOAL) and share_unfinished(counts) <= MAX_UNFINISHED


def report(rooms: Mapping[str, Counter[Verdict]]) -> str:
    """Return the table of all rooms, and a last line that names those that missed the goal."""
    lines = [f"{'room':30}" + "".join(f"{verdict:>11}" for verdict in Verdict) + f"{'no end':>8}{'noticed':>9}"]
    for room, counts in rooms.items():
        share = share_noticed(counts)
        shown = "".join(f"{counts[verdict]:11}" for verdict in Verdict) + f"{share_unfinished(counts):>8.0%}"
        lines.append(f"{room:30}{shown}{'-' if share is None else f'{share:.0%}':>9}")
    missed = [room for room, counts in rooms.items() if not is_goal_reached(counts)]
    goal = f"goal: {GOAL:.0%} of each room noticed, at most {MAX_UNFINISHED:.0%} unfinished"
    return "\n".join([*lines, f"{goal}; missed: {', '.join(missed) or 'none'}"])


def _num_with_effect(counts: Counter[Verdict]) -> int:
    return counts.total() - sum(counts[verdict] for verdict in _WITHOUT_EFFECT)
