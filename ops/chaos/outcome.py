"""The outcome of a scenario: counts, silences and leaks, beside the promised ones; as a table row and a JSON line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.chaos.ledger import Entry, Ledger, Verdict
from ops.text_table import aligned

# Faults so close behind one another are one: what begins to recover from the first one meets the second.
_TOGETHER_S = 1.0


class NotPossibleHereError(Exception):
    """This machine lacks what a scenario needs; the message says what."""


@dataclass
class Outcome:
    """What a scenario measured and what it found broken.

    Attributes:
        num_failed: Admitted requests without a right end; `num_wrong` those whose text differs.
        silences_s: Longest silence of each request that was open during a fault.
        recoveries_s: For how long each of these silences went on after the fault was mended, and those right behind it.
        problems: One sentence per broken promise; an outcome without any is a success.
        figures: What else was measured, by name.
    """

    case: str
    promise: str
    num_requests: int = 0
    num_failed: int = 0
    num_wrong: int = 0
    num_refused: int = 0
    silences_s: list[float] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        """Whether every promise was kept."""
        return not self.problems

    def expect(self, is_kept: bool, problem: str) -> None:
        """Write a problem down unless the promise was kept."""
        if not is_kept:
            self.problems.append(problem)

    def count(self, ledger: Ledger, windows: list[tuple[float, float]]) -> None:
        """Take the counts and silences of a ledger, and write down what it says of broken promises."""
        verdicts = ledger.verdicts()
        broken = ledger.broken()
        self.num_requests += len(ledger.entries)
        self.num_refused += verdicts[Verdict.REFUSED]
        self.num_wrong += verdicts[Verdict.WRONG_TEXT]
        self.num_failed += len(broken) - verdicts[Verdict.WRONG_TEXT]
        disturbed = ledger.during(windows)
        self.silences_s += [entry.longest_silence for entry in disturbed]
        spans = together(windows)
        self.recoveries_s += [max(entry.silent_after_s(*span) for span in spans) for entry in disturbed]
        self.figures |= {f"num {verdict.value}": count for verdict, count in verdicts.items()}
        for entry in broken[:5]:
            self.problems.append(_describe(entry, ledger))
        self.expect(len(broken) <= 5, f"and {len(broken) - 5} more requests")

    def record(self) -> dict[str, Any]:
        """Return the JSON line."""
        return {
            "case": self.case,
            "promise": self.promise,
            "kept": self.is_kept,
            "n": self.num_requests,
            "failed": self.num_failed,
            "wrong": self.num_wrong,
            "refused": self.num_refused,
            "open_during_fault": len(self.silences_s),
            **dict(zip(("silence_p50_s", "silence_p99_s", "silence_max_s"), spread(self.silences_s), strict=True)),
            **self.figures,
            "problems": self.problems,
        }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that a share of all do not exceed; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def spread(values: Sequence[float]) -> list[float | None]:
    """Return the median, the 99th percentile and the largest of some values."""
    return [percentile(values, share) for share in (0.5, 0.99, 1.0)]


def together(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans of time in which something was at fault, or had hardly been mended."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted(windows):
        if spans and start <= spans[-1][1] + _TOGETHER_S:
            start, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((start, end))
    return spans


def table(outcomes: Sequence[Outcome]) -> str:
    """Return all outcomes as text, problems below."""
    heads = ("case", "n", "failed", "wrong", "refused", "silence p50/p99/max s", "promise", "kept")
    rows = [heads, *(_row(outcome) for outcome in outcomes)]
    lines = aligned(rows)
    lines.insert(1, "-" * max(map(len, lines)))
    for outcome in outcomes:
        figures = {name: value for name, value in outcome.figures.items() if not name.startswith("num ")}
        if figures:
            lines.append(f"{outcome.case}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
        lines += [f"{outcome.case}: PROBLEM: {problem}" for problem in outcome.problems]
    return "\n".join(lines)


def _row(outcome: Outcome) -> tuple[str, ...]:
    shown = "/".join("-" if value is None else f"{value:.2f}" for value in spread(outcome.silences_s))
    counts = (outcome.num_requests, outcome.num_failed, outcome.num_wrong, outcome.num_refused)
    return (outcome.case, *map(str, counts), shown, outcome.promise, "yes" if outcome.is_kept else "NO")


def _describe(entry: Entry, ledger: Ledger) -> str:
    verdict = ledger.verdict(entry)
    text = (
        f"request {entry.request_id} (body {entry.variant}, {entry.gateway}) is {verdict.value}: status {entry.status}"
    )
    if entry.error:
        text += f", {entry.error}"
    expected = ledger.references.get(entry.variant)
    if verdict is Verdict.WRONG_TEXT and expected is not None:
        text += f"; expected {expected}, got {entry.answer}"
    return text[:600]
