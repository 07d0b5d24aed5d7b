"""Finds in a run the figure that a goal is about, and the baseline's of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ops.bench.report_records import Row, Run

OURS = "headrace"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, of ours and of the best baseline in the run, where it has one.

    Attributes:
        interval: What holds the true value with 95 %, where that is known.
    """

    value: float
    baseline: float | None = None
    baseline_name: str | None = None
    interval: tuple[float, float] | None = None


Measure = Callable[[Run], Figure | None]


def gateway(field: str, *, concurrency: int, step_ms: float, is_burst: bool = False) -> Measure:
    """Read a field of the isolated gateway, and of the floor; a burst is of one-token requests, its field per core."""

    def measure(run: Run) -> Figure | None:
        def value(target: str) -> float | None:
            for row in _where(run, target=target, concurrency=concurrency, step_ms=step_ms):
                if (row["num_tokens"] == 1) == is_burst and row.get(field) is not None:
                    return float(row[field]) / (row["cores"] if is_burst else 1)
            return None

        ours = value("isolated")
        return None if ours is None else Figure(ours, value("floor"), "floor")

    return measure


def engine(field: str, *, model: str, batch: int, dtype: str | None = "bfloat16", peer: str | None = None) -> Measure:
    """Read a rate of our engine and of the best peer, or of one; without a dtype, each at its best precision."""

    def measure(run: Run) -> Figure | None:
        rows = [row for row in _where(run, model=model, batch=batch) if dtype is None or row.get("dtype") == dtype]
        rows = [row for row in rows if row.get(field) is not None]
        ours = [row[field] for row in rows if row.get("engine") == OURS]
        peers = [row for row in rows if row.get("engine") == peer or (peer is None and row.get("engine") != OURS)]
        return _best(ours, ((row[field], engine_name(row)) for row in peers))

    return measure


def prefix_cache_cost() -> Measure:
    """Read what the prefix cache adds where nothing hits, in percent."""

    def measure(run: Run) -> Figure | None:
        row = next(iter(_where(run, measurement="misses")), None)
        if row is None:
            return None
        low, high = row["cost_percent_interval"]
        return Figure(row["cost_percent"], interval=(low, high))

    return measure


def prefix_cache_hit() -> Measure:
    """Read the milliseconds to the first token of a prompt that is mostly known, and of one that is new."""

    def measure(run: Run) -> Figure | None:
        row = next(iter(_where(run, measurement="hits")), None)
        return None if row is None else Figure(row["hit_ttft_ms"], row["cold_ttft_ms"], "cold")

    return measure


def speculation(model: str, batch: int, *proposers: str) -> Measure:
    """Read the tokens per second with drafts that adapt, by the best of some proposers, and those without drafts."""

    def measure(run: Run) -> Figure | None:
        rows = [row for row in _where(run, model=model, batch=batch) if row["proposer"] in proposers]
        best = max(rows, key=lambda row: float(row["adaptive_speedup"]), default=None)
        if best is None:
            return None
        plain = float(best["plain_tokens_per_s"])
        return Figure(plain * best["adaptive_speedup"], plain, f"plain, beside {best['proposer']}")

    return measure


def worst_speculation(model: str, batch: int) -> Measure:
    """Read the same of the proposer whose drafts serve worst."""

    def measure(run: Run) -> Figure | None:
        rows = list(_where(run, model=model, batch=batch))
        worst = min(rows, key=lambda row: float(row["adaptive_speedup"]), default=None)
        return None if worst is None else speculation(model, batch, worst["proposer"])(run)

    return measure


def kernel_fraction(op: str, shape: str) -> Measure:
    """Read which share of its floor's speed a kernel reaches, and the best baseline."""

    def measure(run: Run) -> Figure | None:
        case = _case(run, op, shape)
        if case is None or not case.get("ceiling_fraction"):
            return None
        name = case.get("best_baseline")
        baseline = case["floor_us"] / case["candidates"][name]["us"] if name else None
        return Figure(case["ceiling_fraction"], baseline, name)

    return measure


def kernel_floors(op: str, shape: str) -> Measure:
    """Read how many times its floor's time a kernel takes, and the best baseline."""
    fraction = kernel_fraction(op, shape)

    def measure(run: Run) -> Figure | None:
        found = fraction(run)
        if found is None:
            return None
        return Figure(1 / found.value, found.baseline and 1 / found.baseline, found.baseline_name)

    return measure


def kernel_time(op: str, shape: str, baseline: str) -> Measure:
    """Read the µs of a kernel and of one baseline, which must have run."""

    def measure(run: Run) -> Figure | None:
        candidates = (_case(run, op, shape) or {}).get("candidates", {})
        if OURS not in candidates or baseline not in candidates:
            return None
        return Figure(candidates[OURS]["us"], candidates[baseline]["us"], baseline)

    return measure


def step_ms(op: str, shape: str) -> Measure:
    """Read the milliseconds of a model's step, and of the best baseline."""

    def measure(run: Run) -> Figure | None:
        case = _case(run, op, shape) or {}
        candidates, name = case.get("candidates", {}), case.get("best_baseline")
        if OURS not in candidates:
            return None
        return Figure(candidates[OURS]["us"] / 1e3, candidates[name]["us"] / 1e3 if name else None, name)

    return measure


def token_rate(op: str, shape: str) -> Measure:
    """Read the tokens per second of a model, and of the best baseline, which took `speedup` times as long."""

    def measure(run: Run) -> Figure | None:
        case = _case(run, op, shape) or {}
        rate, speedup = case.get("tokens_per_s"), case.get("speedup")
        if not rate:
            return None
        return Figure(rate, rate / speedup if speedup else None, case.get("best_baseline"))

    return measure


def idle_percent(op: str, shapes: Iterable[str]) -> Measure:
    """Read the share of a step in which the device waits, in percent: the worst of some shapes, all measured."""
    names = tuple(shapes)

    def measure(run: Run) -> Figure | None:
        cases = [_case(run, op, shape) or {} for shape in names]
        shares = [case["idle_share"] for case in cases if case.get("idle_share") is not None]
        return Figure(max(shares) * 100) if len(shares) == len(names) else None

    return measure


def engine_name(row: Row) -> str:
    """Return the name of an engine, with its precision where that is not bfloat16."""
    dtype = row.get("dtype", "bfloat16")
    return str(row["engine"]) if dtype == "bfloat16" else f"{row['engine']} {dtype}"


def _case(run: Run, op: str, shape: str) -> Row | None:
    return next(iter(_where(run, op=op, shape=shape)), None)


def _where(run: Run, **fields: object) -> Iterable[Row]:
    return (row for row in run.rows if all(row.get(name) == value for name, value in fields.items()))


def _best(ours: list[float], theirs: Iterable[tuple[float, str]]) -> Figure | None:
    if not ours:
        return None
    rate, name = max(theirs, default=(None, None))
    return Figure(max(ours), rate, name)
