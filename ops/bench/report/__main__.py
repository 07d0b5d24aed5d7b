"""Writes where we stand into `ops/bench/README.md`, from what the benchmarks recorded.

Run as `python -m ops.bench.report` after a benchmark. Everything between the two markers is replaced; the rest of the
file is written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.bench.options import bench_parser
from ops.bench.report.goals import GOALS, Goal, Section
from ops.bench.report.records import Run, read_runs
from ops.bench.report.tables import (
    NOT_MEASURED,
    Footnotes,
    Standing,
    decode_table,
    goals_table,
    results_table,
    standing,
    summary,
    table,
)

BEGIN, END = "<!-- report: begin -->", "<!-- report: end -->"
# Whose decode rates are shown beside those of all other engines.
MODELS = ("15m", "160m")

_FOLDER = Path(__file__).parents[1]
_EXPLANATION = """\
A figure is of the latest run on the machine that most results are from; the baseline is of the same run. A ratio above
1 means that ours is better than the baseline; the gateway's floor only writes the same bytes and cannot be beaten. What
others reached was measured or published elsewhere: goals in µs or tokens/s were set beside it and do not carry from
machine to machine, multiples of a baseline do."""


class MissingMarkersError(ValueError):
    """The file lacks the lines that the report is written between."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} needs the lines {BEGIN!r} and {END!r}, in this order; put them where the report goes")


def render(results: Path, goals: tuple[Goal, ...] = GOALS) -> str:
    """Return the report, in Markdown.

    Raises:
        MalformedResultError: A results file holds a line that is not a result.
    """
    names = [*(section.value for section in Section), "scheduler", "startup", "quant"]
    runs = {name: read_runs(results / f"{name}.jsonl") for name in names}
    return _markdown(runs, [standing(goal, runs[goal.section.value]) for goal in goals])


def between_markers(path: Path, text: str) -> str:
    """Return a file's text with what is between the markers replaced.

    Raises:
        MissingMarkersError: The file has no such place.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MissingMarkersError(path)
    return f"{before}{begin}\n{text}\n{end}{after}"


def write(results: Path, readme: Path) -> None:
    """Bring a file up to date."""
    readme.write_text(between_markers(readme, render(results)), encoding="utf-8")


def _markdown(runs: dict[str, list[Run]], standings: list[Standing]) -> str:
    notes = Footnotes()

    def goals_of(section: Section) -> str:
        own = [one for one in standings if one.goal.section is section]
        return goals_table(own, notes) if any(one.found for one in own) else _unmeasured(own)

    parts = [summary(standings), _EXPLANATION]
    parts += ["### Gateway and queue", goals_of(Section.GATEWAY)]
    parts += ["### Engine on a CPU", goals_of(Section.ENGINE)]
    parts += [cells for model in MODELS if (cells := decode_table(runs["engine"], model, notes))]
    parts += ["### Over HTTP, beside other servers on a CPU", goals_of(Section.SERVED)]
    if runs["served"]:
        parts += ["<details><summary>All servers</summary>", results_table(runs["served"], notes), "</details>"]
    parts += ["### Quantized models on a CPU", *_quantized(runs["quant"], notes)]
    parts += ["### Speculative decoding on a CPU", goals_of(Section.SPECULATION)]
    parts += ["### Scheduler", results_table(runs["scheduler"], notes)]
    parts += ["### Start-up", results_table(runs["startup"], notes)]
    parts += ["### Engine on a GPU", goals_of(Section.GPU)]
    if runs["gpu"]:
        parts += ["<details><summary>All cases</summary>", results_table(runs["gpu"], notes), "</details>"]
    parts += ["### Runs", "\n".join(notes.lines())]
    return "\n\n".join(parts)


def _quantized(runs: list[Run], notes: Footnotes) -> list[str]:
    """Write the latest speeds, and the latest perplexities, which are of other models."""
    scored = [run for run in runs if "perplexity" in run.rows[0]]
    speeds = results_table([run for run in runs if run not in scored], notes)
    return [speeds, results_table(scored, notes)] if scored else [speeds]


def _unmeasured(standings: list[Standing]) -> str:
    """List the goals of a section without results, and leave out the columns that would be empty."""
    goals = [one.goal for one in standings]
    cells = table(("what", "goal", "others"), ((goal.what, goal.text, goal.others) for goal in goals))
    return f"{NOT_MEASURED.capitalize()}.\n\n{cells}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report."""
    bench_parser("report", __doc__).parse_args(arguments)
    write(_FOLDER / "results", _FOLDER / "README.md")


if __name__ == "__main__":
    main()
