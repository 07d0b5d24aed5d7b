"""Compares how workers answer: with the rest of their fleet, with other revisions, and with the day before.

The *population stability index* of two histograms is the sum of `(p - q) ln(p / q)` over buckets, 0 for equal ones.
Samples of one distribution differ, too: `PSI / (1/n + 1/m)` is then distributed as chi squared with one degree of
freedom less than buckets. What 999 of 1,000 such pairs stay below is subtracted, so the same limit holds for samples
of all sizes. Buckets are merged with their neighbours until each has a tenth of the answers, and about five of the
smaller sample.

No worker counts for more than the middle one, and while one is beyond the limit, the worst is left out of what the
others are compared with. There is always a majority left: of two workers that differ, both are shown.

Sources: B. Yurdakul, *Statistical Properties of Population Stability Index*, 2018, for the distribution; E. B. Wilson
and M. M. Hilferty, *The Distribution of Chi-Square*, 1931, for its quantile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.telemetry.answer_counts import MEASURES, AnswerRow

LIMIT = 0.25
MIN_ANSWERS = 50
"""Of either side; fewer are not compared."""
MAX_WORKERS = 256
"""Shown of a fleet, and compared."""
Compared = Literal["fleet", "revision", "yesterday"]

_MIN_SHARE = 0.1
# Quantile 0.999 of the normal distribution.
_Z = 3.09
_MAX_LEFT_OUT = 8

_Histograms = tuple[list[float], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One worker compared.

    Attributes:
        answers: Of the worker, today.
        others: Answers that it is compared with, each worker's no more than the middle one's.
        psi: In the order of `MEASURES`, less what chance explains; None with too few answers.
    """

    model: str
    worker: str
    revision: str
    compared_with: Compared
    answers: int
    others: int
    psi: tuple[float | None, ...]

    @property
    def worst(self) -> float | None:
        """The largest index; None if nothing could be compared."""
        return max((each for each in self.psi if each is not None), default=None)

    @property
    def verdict(self) -> str:
        """`same`, `differs` or `too few answers`."""
        if self.worst is None:
            return "too few answers"
        return "differs" if self.worst > LIMIT else "same"


def compare(today: Iterable[AnswerRow], yesterday: Iterable[AnswerRow]) -> list[Finding]:
    """Return every comparison of workers that have answered today; a worker has one row for each revision and day."""
    now, before = _by_revision(today), _by_revision(yesterday)
    findings = []
    for model, revisions in now.items():
        for revision, rows in revisions.items():
            earlier = before.get(model, {})
            both = (each for days in (revisions, earlier) for name, each in days.items() if name != revision)
            others = [row for each in both for row in each]
            findings += _within(rows)
            findings += _with(rows, "revision", others) + _with(rows, "yesterday", earlier.get(revision, []))
    return findings


def merged(rows: Iterable[AnswerRow]) -> list[AnswerRow]:
    """Add up the rows of several gateways."""
    found: dict[tuple[str, str, str], AnswerRow] = {}
    for row in rows:
        key = (row.model, row.worker, row.revision)
        if key in found:
            pairs = zip(found[key].histograms, row.histograms, strict=True)
            found[key] = AnswerRow(*key, *([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))
        else:
            found[key] = row
    return list(found.values())


def psi(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the index of two histograms less what chance explains, 0 at least; None with too few values."""
    n, m = sum(one), sum(other)
    if min(n, m) < MIN_ANSWERS:
        return None
    buckets: list[list[float]] = []
    is_full = True
    for a, b in zip(one, other, strict=True):
        if is_full:
            buckets.append([0.0, 0.0])
        buckets[-1][0] += a
        buckets[-1][1] += b
        is_full = (buckets[-1][0] / n + buckets[-1][1] / m) / 2 >= _MIN_SHARE
    if not is_full and len(buckets) > 1:
        last = buckets.pop()
        buckets[-1] = [buckets[-1][0] + last[0], buckets[-1][1] + last[1]]
    half = 0.5 * len(buckets)
    total = 0.0
    for a, b in buckets:
        p, q = (a + 0.5) / (n + half), (b + 0.5) / (m + half)
        total += (p - q) * math.log(p / q)
    return max(0.0, total - _chance(len(buckets) - 1) * (1 / n + 1 / m))


def _chance(freedom: int) -> float:
    if not freedom:
        return 0.0
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + _Z * math.sqrt(part)) ** 3)


def _by_revision(rows: Iterable[AnswerRow]) -> dict[str, dict[str, list[AnswerRow]]]:
    found: defaultdict[str, defaultdict[str, list[AnswerRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        own = found[row.model][row.revision]
        if len(own) < MAX_WORKERS:
            own.append(row)
    return {model: dict(revisions) for model, revisions in found.items()}


class _Pool:
    """Histograms added up; no worker counts for more than the middle one of those with enough answers."""

    def __init__(self, rows: list[AnswerRow]) -> None:
        self._most = [_middle(sum(row.histograms[place]) for row in rows) for place in range(len(MEASURES))]
        self.sums = tuple([sum(bucket) for bucket in zip(*each, strict=True)] for each in self._scaled(rows))

    def without(self, row: AnswerRow) -> _Histograms:
        """Return the sums of all but this one of the rows."""
        own = [each[0] for each in self._scaled([row])]
        pairs = zip(self.sums, own, strict=True)
        return tuple([max(0.0, a - b) for a, b in zip(*pair, strict=True)] for pair in pairs)

    def _scaled(self, rows: list[AnswerRow]) -> list[list[list[float]]]:
        return [[_at_most(row.histograms[place], most) for row in rows] for place, most in enumerate(self._most)]


def _middle(totals: Iterable[int]) -> int:
    enough = sorted(total for total in totals if total >= MIN_ANSWERS)
    return enough[len(enough) // 2] if enough else MIN_ANSWERS


def _at_most(counts: list[int], most: int) -> list[float]:
    scale = min(1.0, most / max(1, sum(counts)))
    return [count * scale for count in counts]


def _within(rows: list[AnswerRow]) -> list[Finding]:
    if len(rows) < 2:
        return []
    left, apart = list(rows), list[Finding]()
    while True:
        pool = _Pool(left)
        found = [_finding(row, "fleet", pool.without(row)) for row in left]
        worst = max(found, key=lambda each: each.worst or 0.0)
        if len(apart) >= min((len(rows) - 1) // 2, _MAX_LEFT_OUT) or worst.verdict != "differs":
            return found + apart
        apart.append(worst)
        del left[found.index(worst)]


def _with(rows: list[AnswerRow], compared_with: Compared, others: list[AnswerRow]) -> list[Finding]:
    if not others:
        return []
    pool = _Pool(others)
    return [_finding(row, compared_with, pool.sums) for row in rows]


def _finding(row: AnswerRow, compared_with: Compared, reference: _Histograms) -> Finding:
    values = tuple(psi(own, other) for own, other in zip(row.histograms, reference, strict=True))
    names = (row.model, row.worker, row.revision)
    return Finding(*names, compared_with, sum(row.lengths), round(sum(reference[0])), values)
