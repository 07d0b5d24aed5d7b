"""Writes the report's Markdown: a table of goals a section, decode rates, and results that no goal is set for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ops.bench.report.figures import OURS, Figure, engine_name
from ops.bench.report.goals import Goal
from ops.bench.report.records import Row, Run, latest

NOT_MEASURED = "not measured yet"
_ORIGIN_FIELDS = frozenset({"time", "commit", "machine", "versions", "load_average", "command", "process"})
_COLUMNS = ("what", "goal", "others", "measured", "baseline in the run", "ratio", "verdict", "run")


@dataclass(frozen=True, slots=True)
class Standing:
    """A goal, and the run and figure that speak for it, where there are any."""

    goal: Goal
    found: tuple[Run, Figure] | None

    @property
    def reached(self) -> float | None:
        """The fraction of the goal that is reached; None if unknown."""
        return None if self.found is None else self.goal.reached(self.found[1])

    @property
    def verdict(self) -> str:
        """Met, missed or not measured yet."""
        reached = self.reached
        if reached is None:
            return NOT_MEASURED
        return "met" if reached >= 1 else "**missed**"


@dataclass(slots=True)
class Footnotes:
    """Numbers the runs that the tables refer to, in the order of their first mention."""

    runs: list[Run] = field(default_factory=list)

    def number(self, run: Run) -> int:
        """Return the number of a run."""
        if run not in self.runs:
            self.runs.append(run)
        return self.runs.index(run) + 1

    def lines(self) -> list[str]:
        """Return where each run is from."""
        return [f"{number}. {run.origin}" for number, run in enumerate(self.runs, start=1)]


def standing(goal: Goal, runs: list[Run]) -> Standing:
    """Find what the latest run says about a goal."""
    return Standing(goal, None if goal.measure is None else latest(runs, goal.measure))


def summary(standings: list[Standing]) -> str:
    """Count the verdicts."""
    verdicts = [one.verdict for one in standings]
    met, unknown = verdicts.count("met"), verdicts.count(NOT_MEASURED)
    missed = len(verdicts) - met - unknown
    return f"Of {len(verdicts)} goals **{met} are met**, **{missed} are missed**, and {unknown} are {NOT_MEASURED}."


def goals_table(standings: Iterable[Standing], notes: Footnotes) -> str:
    """Write a line a goal."""
    return table(_COLUMNS, (_goal_cells(one, notes) for one in standings))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def decode_table(runs: list[Run], model: str, notes: Footnotes) -> str:
    """Write decode rates by batch size, a line an engine and precision, ours first; nothing where none was compared."""
    found = latest(runs, lambda run: _decode_rates(run, model))
    if found is None:
        return ""
    run, rates = found
    batches = sorted({batch for by_batch in rates.values() for batch in by_batch})
    names = sorted(rates, key=lambda name: (not name.startswith(OURS), name))
    lines = ([name, *(number(rates[name][one]) if one in rates[name] else "" for one in batches)] for name in names)
    cells = table([f"{model.upper()}, decode tokens/s at batch", *map(str, batches)], lines)
    return f"{cells}\n\nRun {notes.number(run)}."


def _decode_rates(run: Run, model: str) -> dict[str, dict[int, float]] | None:
    """Return the rates by engine and batch size, where ours and another engine have any."""
    rates: dict[str, dict[int, float]] = {}
    engines = set()
    for row in run.rows:
        if row.get("model") == model and row.get("decode_tokens_per_s"):
            engines.add(row["engine"])
            rates.setdefault(engine_name(row), {})[int(row["batch"])] = float(row["decode_tokens_per_s"])
    return rates if OURS in engines and len(engines) > 1 else None


def results_table(runs: list[Run], notes: Footnotes) -> str:
    """Write what the latest run recorded, a line a row, leaving out checks and what is not a number or a word."""
    found = latest(runs, lambda run: [row for row in run.rows if "check" not in row] or None)
    if found is None:
        return f"{NOT_MEASURED.capitalize()}."
    run, rows = found
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if _is_shown(name, rows)]
    cells = table(
        [name.replace("_", " ") for name in names], ([_cell(row.get(name)) for name in names] for row in rows)
    )
    return f"{cells}\n\nRun {notes.number(run)}."


def _goal_cells(one: Standing, notes: Footnotes) -> list[str]:
    goal = one.goal
    cells = [goal.what, goal.text, goal.others]
    if one.found is None:
        return [*cells, "", "", "", one.verdict, ""]
    run, figure = one.found
    ratio = goal.ratio(figure)
    baseline = "" if figure.baseline is None else f"{number(figure.baseline)} ({figure.baseline_name})"
    measured = f"{number(figure.value)} {goal.unit}".strip()
    return [*cells, measured, baseline, "" if ratio is None else f"{ratio:.2f}", one.verdict, str(notes.number(run))]


def number(value: float) -> str:
    """Write three digits, or all of a large number."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _is_shown(name: str, rows: list[Row]) -> bool:
    values = [row.get(name) for row in rows]
    return name not in _ORIGIN_FIELDS and any(isinstance(value, str | int | float) for value in values)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, dict | list):
        return "" if value is None or isinstance(value, dict | list) else str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 10_000 else str(value)
