"""Compares two runs, with confidence intervals.

Requests that are near in time share their fate (a queue, a pause), so they are not independent samples. A run is cut
into spans of time, and the requests that were due in a span are drawn together again with replacement (a block
bootstrap); the interval holds 95 % of the ratios B / A of the draws. It covers what varies within a run, and nothing of
what varies from one run to the next.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from ops.load_generator.record import Record, Report, ReportError
from ops.load_generator.summary import latencies
from ops.text_table import aligned

_NUM_BLOCKS = 25
_LEAST_REQUESTS = 20
_DRAWS = 500
# Percentiles of few blocks make intervals too narrow; these tails are widened for 25 (Hesterberg, 2015, "What Teachers
# Should Know About the Bootstrap", section 5.3: the normal tail of sqrt(n / (n - 1)) times Student's t).
_TAIL = 0.0176

Sample = Callable[[Sequence[int]], float | None]
"""A figure of a run, of the blocks that were drawn."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of two runs.

    Attributes:
        ratio: B / A, and the ends of its interval; None where it cannot be told.
        is_more_better: A larger figure is the better one.
    """

    name: str
    first: float | None
    second: float | None
    ratio: tuple[float, float, float] | None
    is_more_better: bool

    @property
    def verdict(self) -> str:
        """Return whether B differs from A."""
        if self.ratio is None:
            return "cannot be told"
        _, low, high = self.ratio
        if low <= 1 <= high:
            return "no difference seen"
        return "better" if (low > 1) == self.is_more_better else "worse"


def compare(first: Report, second: Report) -> list[Difference]:
    """Return the difference of each figure.

    Raises:
        ReportError: A run has too few requests that ended well.
    """
    for name, report in (("A", first), ("B", second)):
        if (completed := sum(record.problem is None for record in report.requests)) < _LEAST_REQUESTS:
            raise ReportError(f"{name} has {completed} completed requests; intervals need {_LEAST_REQUESTS} at least")
    draw = random.Random("compare")
    whole = range(_NUM_BLOCKS)
    draws = [(draw.choices(whole, k=_NUM_BLOCKS), draw.choices(whole, k=_NUM_BLOCKS)) for _ in range(_DRAWS)]
    return [
        _difference(name, one, other, is_more_better, draws)
        for (name, one, is_more_better), (_, other, _) in zip(_figures(first), _figures(second), strict=True)
    ]


def table(first: Report, second: Report) -> list[str]:
    """Return the comparison for people."""
    rows = [["", "A", "B", "B / A", "95 % interval", "B is"]]
    for each in compare(first, second):
        figures = ["-" if value is None else f"{value:,.2f}" for value in (each.first, each.second)]
        ratio, span = "-", "-"
        if each.ratio is not None:
            ratio, span = f"{each.ratio[0]:.3f}", f"{each.ratio[1]:.3f} to {each.ratio[2]:.3f}"
        rows.append([each.name, *figures, ratio, span, each.verdict])
    notes = [*_differences(first, second), *_losses("A", first), *_losses("B", second)]
    return [*aligned(rows), *([""] if notes else []), *notes]


def _differences(first: Report, second: Report) -> Iterator[str]:
    """Yield how the loads differ, by the options of `headrace bench serve`, and the limits of goodput."""
    names = sorted({*first.load, *second.load} - {"goodput"})
    pairs = {name: (first.load.get(name), second.load.get(name)) for name in names}
    different = [
        f"--{name.replace('_', '-')} {_value(one)} and {_value(other)}"
        for name, (one, other) in pairs.items()
        if one != other
    ]
    if different:
        yield f"A and B had different loads: {'; '.join(different)}."
    if first.goodput_ms != second.goodput_ms:
        limits = " and ".join(_limits(each.goodput_ms) for each in (first, second))
        yield f"A and B count goodput by different limits: --goodput {limits}."


def _limits(goodput_ms: dict[str, float]) -> str:
    return " ".join(f"{kind}:{limit:g}" for kind, limit in goodput_ms.items()) or "not set"


def _value(value: object) -> str:
    return "not set" if value is None else "set" if value is True else str(value)


def _losses(name: str, report: Report) -> Iterator[str]:
    """Yield what a run lacks."""
    completed, planned = report.summary["completed"], len(report.requests) + report.num_unfinished
    if report.num_unfinished:
        yield f"{name} was interrupted: it has {len(report.requests)} of {planned} requests, those of its beginning."
    if completed < planned:
        lost = f"{planned - completed} were refused, failed or did not end"
        yield f"{name}: {completed} of {planned} requests completed; {lost}, and latencies are of the completed ones."


def _figures(report: Report) -> list[tuple[str, Sample, bool]]:
    """Return the figures of a run, by name, and whether more is better."""
    blocks = _blocks(report.requests)
    span_s = report.duration_s / len(blocks)
    completed = [sum(record.problem is None for record in block) for block in blocks]
    tokens = [sum(record.output_tokens for record in block if record.problem is None) for block in blocks]
    sizes = list(map(len, blocks))
    found: list[tuple[str, Sample, bool]] = [
        ("requests/s", _rate(completed, span_s), True),
        ("output tokens/s", _rate(tokens, span_s), True),
        ("completed, %", lambda drawn: 100 * _sum(completed, drawn) / max(1, _sum(sizes, drawn)), True),
    ]
    if report.goodput_ms:
        met = [sum(record.meets(report.goodput_ms) for record in block) for block in blocks]
        found.append(("goodput, requests/s", _rate(met, span_s), True))
    else:
        found.append(("goodput, requests/s", lambda _drawn: None, True))
    kept = [latencies(block) for block in blocks]
    for kind, percents in (("ttft", (50, 99)), ("itl", (50, 99)), ("tpot", (50,)), ("e2el", (50, 99))):
        values = [block[kind] for block in kept]
        found += [(f"{kind.upper()} p{percent}, ms", _quantile(values, percent / 100), False) for percent in percents]
    return found


def _blocks(records: Sequence[Record]) -> list[list[Record]]:
    span_s = max(record.intended_s for record in records) / _NUM_BLOCKS or 1.0
    blocks: list[list[Record]] = [[] for _ in range(_NUM_BLOCKS)]
    for record in records:
        blocks[min(_NUM_BLOCKS - 1, int(record.intended_s / span_s))].append(record)
    return blocks


def _sum(values: Sequence[int], drawn: Sequence[int]) -> int:
    return sum(values[block] for block in drawn)


def _rate(counts: Sequence[int], span_s: float) -> Sample:
    return lambda drawn: _sum(counts, drawn) / (span_s * len(drawn))


def _quantile(values: Sequence[list[float]], share: float) -> Sample:
    """Return milliseconds below which a share of the drawn blocks' seconds are."""
    blocks = [sorted(block) for block in values]
    sizes = list(map(len, blocks))
    ordered = sorted(chain.from_iterable(blocks))

    @cache
    def counts(place: int) -> list[int]:
        """Return how many values of each block are not above that of a place. Searches look at the same few places."""
        return [bisect_right(block, ordered[place]) for block in blocks]

    def sample(drawn: Sequence[int]) -> float | None:
        total = _sum(sizes, drawn)
        low, high = 0, len(ordered) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _sum(counts(middle), drawn) > share * total else (middle + 1, high)
        return 1e3 * ordered[low] if total else None

    return sample


def _difference(
    name: str,
    first: Sample,
    second: Sample,
    is_more_better: bool,
    draws: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> Difference:
    figures = first(range(_NUM_BLOCKS)), second(range(_NUM_BLOCKS))
    ratio = _ratio(*figures)
    ratios = sorted(drawn for ours, theirs in draws if (drawn := _ratio(first(ours), second(theirs))) is not None)
    if ratio is None or len(ratios) < len(draws):
        return Difference(name, *figures, None, is_more_better)
    low, high = ratios[int(_TAIL * len(ratios))], ratios[-1 - int(_TAIL * len(ratios))]
    return Difference(name, *figures, (ratio, low, high), is_more_better)


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None
