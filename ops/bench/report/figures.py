"""Finds in a run the figure that a goal is about, and the baseline's of the same run.

Each function takes the run last: a goal holds one with its other arguments bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec

from ops.bench.report.records import Row, Run

OURS = "headrace"
_Options = ParamSpec("_Options")


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, of ours and of the best baseline in the run, where it has one."""

    value: float
    baseline: float | None = None
    baseline_name: str | None = None


Measure = Callable[[Run], Figure | None]


def _measure(
    find: Callable[Concatenate[Run, _Options], Figure | None],
) -> Callable[_Options, Measure]:
    """Turn a function of a run and options into one of the options that returns one of the run."""

    def bind(*arguments: _Options.args, **options: _Options.kwargs) -> Measure:
        return lambda run: find(run, *arguments, **options)

    return bind


@_measure
def gateway(run: Run, field: str, *, concurrency: int, step_ms: float, is_burst: bool = False) -> Figure | None:
    """Read a field of the isolated gateway, and of the floor; a burst is of one-token requests, its field per core."""

    def value(target: str) -> float | None:
        for row in _where(run, target=target, concurrency=concurrency, step_ms=step_ms):
            if (row["num_tokens"] == 1) == is_burst and row.get(field) is not None:
                return float(row[field]) / (row["cores"] if is_burst else 1)
        return None

    ours = value("isolated")
    return None if ours is None else Figure(ours, value("floor"), "floor")


@_measure
def engine(
    run: Run, field: str, *, model: str, batch: int, dtype: str | None = "bfloat16", peer: str | None = None
) -> Figure | None:
    """Read a rate of our engine and of the best peer, or of one; without a dtype, each at its best precision."""
    rows = [row for row in _where(run, model=model, batch=batch) if dtype is None or row.get("dtype") == dtype]
    rows = [row for row in rows if row.get(field) is not None]
    ours = [row[field] for row in rows if row.get("engine") == OURS]
    if not ours:
        return None
    peers = [row for row in rows if row.get("engine") == peer or (peer is None and row.get("engine") != OURS)]
    rate, name = max(((row[field], engine_name(row)) for row in peers), default=(None, None))
    return Figure(max(ours), rate, name)


@_measure
def speculation(run: Run, model: str, batch: int, *proposers: str, choose: Callable[..., Row] = max) -> Figure | None:
    """Read the tokens per second with drafts that adapt, and those without drafts.

    The figure is that of the proposer whose speed-up `choose` picks.
    """
    rows = [row for row in _where(run, model=model, batch=batch) if row["proposer"] in proposers]
    if not rows:
        return None
    chosen = choose(rows, key=lambda row: float(row["adaptive_speedup"]))
    plain = float(chosen["plain_tokens_per_s"])
    return Figure(plain * chosen["adaptive_speedup"], plain, f"plain, beside {chosen['proposer']}")


@_measure
def _case_figure(
    run: Run, read: Callable[[Row, float], float], op: str, shape: str, baseline: str | None = None
) -> Figure | None:
    """Read what follows from the µs that a case took, ours and those of the best baseline or of one, which must be."""
    case = _case(run, op, shape)
    times = {name: one["us"] for name, one in case.get("candidates", {}).items()}
    name = baseline or case.get("best_baseline")
    if OURS not in times or (baseline is not None and baseline not in times):
        return None
    return Figure(read(case, times[OURS]), None if name is None else read(case, times[name]), name)


kernel_time = partial(_case_figure, lambda case, us: us)
step_ms = partial(_case_figure, lambda case, us: us / 1e3)
# The share of its floor's speed that a kernel reaches, and how many times its floor's time it takes.
kernel_fraction = partial(_case_figure, lambda case, us: case["floor_us"] / us)
kernel_floors = partial(_case_figure, lambda case, us: us / case["floor_us"])
# Tokens per second are recorded of ours; a baseline makes as many in its time.
token_rate = partial(_case_figure, lambda case, us: case["tokens_per_s"] * case["candidates"][OURS]["us"] / us)


@_measure
def idle_percent(run: Run, op: str, shapes: tuple[str, ...]) -> Figure | None:
    """Read the share of a step in which the device waits, in percent: the worst of some shapes, all measured."""
    shares = [case["idle_share"] for shape in shapes if (case := _case(run, op, shape)).get("idle_share") is not None]
    return Figure(max(shares) * 100) if len(shares) == len(shapes) else None


def engine_name(row: Row) -> str:
    """Return the name of an engine, with its precision where that is not bfloat16."""
    dtype = row.get("dtype", "bfloat16")
    return str(row["engine"]) if dtype == "bfloat16" else f"{row['engine']} {dtype}"


def _case(run: Run, op: str, shape: str) -> Row:
    """Return what was recorded of a case; nothing where its op gave wrong results and was timed anyway."""
    return next((row for row in _where(run, op=op, shape=shape) if row.get("is_right", True)), {})


def _where(run: Run, **fields: object) -> Iterable[Row]:
    return (row for row in run.rows if all(row.get(name) == value for name, value in fields.items()))
