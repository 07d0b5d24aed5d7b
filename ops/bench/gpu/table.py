"""The results as text: checks that failed, then one line a case."""

from __future__ import annotations

from collections.abc import Sequence

from ops.bench.gpu.case import OURS
from ops.bench.gpu.ceilings import Ceilings
from ops.bench.gpu.run import CaseResult, CheckResult

HEADER = f"{'op':<18}{'shape':<38}{'ours µs':>10}{'ceiling':>9}  best baseline, then the others (µs, ours is × faster)"


def check_lines(results: Sequence[CheckResult]) -> list[str]:
    """Return a line for each wrong check, and one for all that are right."""
    right = [result for result in results if result.is_right]
    lines = [
        f"WRONG {result.op:<17}{result.label:<52}"
        + (f"{result.error:.2e} of {result.tolerance:.0e}" if result.error is not None else str(result.failure))
        for result in results
        if not result.is_right
    ]
    if right:
        worst = max(right, key=lambda result: (result.error or 0.0) / (result.tolerance or 1.0))
        text = f"{worst.error:.2e} of {worst.tolerance:.0e} at {worst.label}"
        lines.append(f"ok    {worst.op:<17}{len(right)} checks, the farthest off {text}")
    return lines


def ceiling_line(ceilings: Ceilings) -> str:
    """Return what the fractions are of."""
    return f"ceilings: {ceilings.bandwidth / 1e12:.2f} TB/s copy, {ceilings.matmul_rate / 1e12:.0f} TFLOP/s bf16"


def case_line(result: CaseResult) -> str:
    """Return the line of a case; `*` marks times that may hold the host's."""
    ours = result.timings.get(OURS)
    if ours is None:
        return f"{result.op:<18}{result.label:<38}{'-':>10}{'-':>9}  {result.failures.get(OURS, 'not run')}"
    others = sorted((timing.seconds, name) for name, timing in result.timings.items() if name != OURS)
    # A baseline leads, not another configuration of ours.
    others.sort(key=lambda pair: pair[1] != result.best_baseline)
    compared = [
        f"{name} {_micros(seconds)}{'' if result.timings[name].is_graphed else '*'} (×{seconds / ours.seconds:.2f})"
        for seconds, name in others
    ]
    failed = [f"{name}: -" for name in result.failures]
    rates = []
    if result.tokens_per_s is not None:
        rates.append(f"{result.tokens_per_s:.0f} tokens/s")
    if result.idle_share is not None:
        rates.append(f"device idle {result.idle_share:.1%}")
    time_text = _micros(ours.seconds) + ("" if ours.is_graphed else "*")
    fraction = f"{result.fraction or 0:.1%}"
    return f"{result.op:<18}{result.label:<38}{time_text:>10}{fraction:>9}  " + ", ".join(rates + compared + failed)


def failure_lines(results: Sequence[CaseResult]) -> list[str]:
    """Return why candidates did not run, each reason once."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for name, reason in result.failures.items():
            reasons.setdefault(f"{name}: {reason}", []).append(f"{result.op} {result.label}")
    return [f"not run: {reason} [{len(places)}: {places[0]}]" for reason, places in reasons.items()]


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
