"""The report is what the results make of it: it cannot rot, and it says what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench.gpu.suites import all_suites
from ops.bench.report import __main__ as report
from ops.bench.report.figures import Figure, engine, gateway, kernel_fraction
from ops.bench.report.goals import GOALS, GPU_GOALS, Goal, Kind, Section
from ops.bench.report.records import MalformedResultError, Run, latest, read_runs
from ops.bench.report.tables import NOT_MEASURED, Footnotes, decode_table, standing

FOLDER = Path(report.__file__).parents[1]
SMALL: dict[str, Any] = {"cpu": "small", "cores": 2}
LARGE: dict[str, Any] = {"cpu": "large", "cores": 64}


def row(machine: dict[str, Any] = SMALL, time: str = "2026-01-01T00:00:00Z", **fields: object) -> dict[str, Any]:
    return {"time": time, "commit": "abc", "machine": machine, "command": "bench", **fields}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def rate(run: Run) -> float | None:
    return run.rows[0].get("rate")


def test_readme_is_what_the_results_make_of_it() -> None:
    readme = FOLDER / "README.md"
    expected = report.between_markers(readme, report.render(FOLDER / "results"))
    assert readme.read_text(encoding="utf-8") == expected, "results have changed: run `python -m ops.bench.report`"


def test_section_without_results_is_said_to_be_not_measured(tmp_path: Path) -> None:
    text = report.render(tmp_path)
    sections = text.split("### ")[1:-1]
    assert len(sections) == 8
    assert all(NOT_MEASURED in section.lower() for section in sections)
    assert f"**0 are met**, **0 are missed**, and {len(GOALS)} are {NOT_MEASURED}" in text


def test_decode_rates_have_a_line_for_each_engine_and_precision() -> None:
    kinds = [("peer", "bfloat16"), ("headrace", "int4"), ("headrace", "bfloat16")]
    rows = [
        row(model="15m", engine=name, dtype=dtype, batch=batch, decode_tokens_per_s=100.0 * batch)
        for name, dtype in kinds
        for batch in (1, 4)
        if (name, batch) != ("peer", 4)
    ]
    notes = Footnotes()
    lines = decode_table([Run(tuple(rows))], "15m", notes).splitlines()
    assert lines[0] == "| 15M, decode tokens/s at batch | 1 | 4 |"
    assert lines[2:5] == ["| headrace | 100 | 400 |", "| headrace int4 | 100 | 400 |", "| peer | 100 |  |"]
    assert lines[-1] == "Run 1."
    assert decode_table([Run(tuple(rows))], "160m", notes) == ""
    assert decode_table([Run(tuple(one for one in rows if one["engine"] == "headrace"))], "15m", notes) == ""


def test_latest_run_of_the_machine_with_most_rows_counts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "engine.jsonl",
        row(SMALL, "2026-01-01T00:00:00Z", rate=1.0),
        row(SMALL, "2026-01-02T00:00:00Z", rate=2.0),
        row(SMALL, "2026-01-03T00:00:00Z", other=9.0),
        row(LARGE, "2026-01-04T00:00:00Z", rate=3.0),
    )
    found = latest(read_runs(path), rate)
    assert found is not None
    assert found[1] == 2.0
    assert found[0].origin == "small, 2 cores, 2026-01-02, commit abc: `bench`"


def test_nobody_tells_where_no_run_has_the_figure(tmp_path: Path) -> None:
    assert latest(read_runs(write(tmp_path / "x.jsonl", row(other=1))), rate) is None
    assert latest(read_runs(tmp_path / "absent.jsonl"), rate) is None


def test_rows_of_one_process_are_one_run_however_long_it_took(tmp_path: Path) -> None:
    rows = [row(SMALL, f"2026-01-01T0{hour}:00:00Z", process=process) for hour, process in enumerate((7, 7, 8))]
    assert [len(run.rows) for run in read_runs(write(tmp_path / "x.jsonl", *rows))] == [2, 1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"time": "2026", "command": "bench"}', "no 'machine'"),
        ('{"time": "2026", "command": "bench", "machine": {"cpu": "x"}}', "'machine' names neither"),
    ],
)
def test_malformed_line_is_named_with_its_file(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "gateway.jsonl", row())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MalformedResultError, match=rf"gateway\.jsonl:2: .*{problem}") as caught:
        report.render(tmp_path)
    assert caught.value.line == 2


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(tmp_path, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\nOf ")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert "old" not in text


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}"])
def test_file_without_markers_is_refused(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(report.MissingMarkersError, match=r"README\.md needs the lines"):
        report.between_markers(readme, "")


@pytest.mark.parametrize(
    ("goal", "figure", "reached"),
    [
        (Goal(Section.GATEWAY, "rate", Kind.AT_LEAST, 200, "/s"), Figure(150), 0.75),
        (Goal(Section.GATEWAY, "cost", Kind.AT_MOST, 10, "µs"), Figure(20), 0.5),
        (Goal(Section.GATEWAY, "cost", Kind.AT_MOST, 1, "%"), Figure(-0.2), float("inf")),
        (Goal(Section.ENGINE, "rate", Kind.TIMES, 1.2, "/s"), Figure(180, 100, "peer"), 1.5),
        (Goal(Section.ENGINE, "time", Kind.FRACTION, 20, "ms"), Figure(10, 100, "cold"), 0.5),
        (Goal(Section.ENGINE, "rate", Kind.TIMES, 1.2, "/s"), Figure(180), None),
    ],
)
def test_fraction_of_a_goal(goal: Goal, figure: Figure, reached: float | None) -> None:
    assert goal.reached(figure) == pytest.approx(reached)


def test_verdict_follows_the_fraction() -> None:
    def verdict(value: float) -> str:
        goal = Goal(Section.GATEWAY, "cost", Kind.AT_MOST, 10, "µs", measure=lambda run: Figure(value))
        return standing(goal, [Run((row(),))]).verdict

    assert (verdict(10), verdict(10.1)) == ("met", "**missed**")


def test_best_peer_of_the_run_at_equal_precision_is_the_baseline() -> None:
    rows = [
        row(model="160m", batch=4, engine=name, dtype=dtype, decode_tokens_per_s=value)
        for name, dtype, value in (
            ("headrace", "bfloat16", 10.0),
            ("slow", "bfloat16", 5.0),
            ("fast", "bfloat16", 8.0),
            ("fast", "int4", 30.0),
        )
    ]
    run = Run(tuple(rows))
    assert engine("decode_tokens_per_s", model="160m", batch=4)(run) == Figure(10.0, 8.0, "fast")
    assert engine("decode_tokens_per_s", model="160m", batch=4, dtype=None)(run) == Figure(10.0, 30.0, "fast int4")
    assert engine("decode_tokens_per_s", model="15m", batch=4)(run) is None


def test_burst_of_short_requests_is_no_sample_of_long_streams() -> None:
    load = {"concurrency": 64, "step_ms": 1.0, "num_tokens": 1, "cores": 0.5, "requests_per_s": 100.0}
    run = Run((row(target="isolated", **load), row(target="floor", **load)))
    burst = gateway("requests_per_s", concurrency=64, step_ms=1.0, is_burst=True)
    assert burst(run) == Figure(200.0, 200.0, "floor")
    assert gateway("requests_per_s", concurrency=64, step_ms=1.0)(run) is None


def test_kernel_is_compared_with_the_best_baseline_by_their_shares_of_the_floor() -> None:
    candidates = {"headrace": {"us": 10.0}, "peer": {"us": 16.0}}
    case = {"floor_us": 8.0, "best_baseline": "peer", "candidates": candidates}
    run = Run((row(op="rms_norm", shape="8x8", **case),))
    assert kernel_fraction("rms_norm", "8x8")(run) == Figure(0.8, 0.5, "peer")


def test_kernel_that_was_timed_though_it_is_wrong_speaks_for_no_goal() -> None:
    case = {"floor_us": 8.0, "ceiling_fraction": 0.8, "best_baseline": None, "is_right": False}
    assert kernel_fraction("rms_norm", "8x8")(Run((row(op="rms_norm", shape="8x8", **case),))) is None


def test_goals_on_a_gpu_name_cases_that_exist() -> None:
    cases = {(suite.name, spec.label) for suite in all_suites() for spec in suite.cases}
    fields = {
        "floor_us": 4.0,
        "ceiling_fraction": 0.5,
        "idle_share": 0.01,
        "tokens_per_s": 9.0,
        "speedup": 2.0,
        "best_baseline": "SDPA cuDNN",
        "candidates": {name: {"us": 8.0} for name in ("headrace", "SDPA cuDNN", "torch.compile")},
    }
    run = Run(tuple(row({"device": "gpu"}, op=op, shape=shape, **fields) for op, shape in sorted(cases)))
    measured = [goal for goal in GPU_GOALS if goal.measure is not None]
    assert len(measured) >= 12
    assert [goal.what for goal in measured if standing(goal, [run]).found is None] == []
