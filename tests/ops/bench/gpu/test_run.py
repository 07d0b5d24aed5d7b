"""The run, its table and its records, with a scripted timer."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ops.bench.gpu import run as suite_run
from ops.bench.gpu import timer
from ops.bench.gpu.__main__ import main
from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, Case, CaseSpec, Check, Clock, OpSuite
from ops.bench.gpu.results import CheckResult, RunRecord
from ops.bench.gpu.run import (
    WRONG,
    JobFailedError,
    Verdicts,
    poisoned_memory,
    run_apart,
    run_suite,
    run_suites,
    time_op,
)
from ops.bench.gpu.timer import Timing
from tests.ops.bench.bare_machine import run_without

CPU = torch.device("cpu")
SECONDS = {OURS: 2e-6, "slow": 8e-6, "fast": 3e-6, f"{OURS}/other": 1e-6, "ceiling": 1.0}


class ToldTimer:
    """Calls once, and takes the name that the call returns for its time."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        assert clock is not Clock.OWN
        name = call(num_sets - 1)
        return Timing(SECONDS[name if isinstance(name, str) else "ceiling"], 0.01, is_graphed=name != "slow")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_COPY_BYTES", 1000)
    monkeypatch.setattr(timer, "_MATRIX_SIZE", 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_a_gpu_is_freed_behind_each_case(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(device))
    ceilings = timer.Ceilings(1.0, 1.0, 1.0)
    found = list(time_op(make_suite("a"), torch.device(device), ToldTimer(), ceilings, -1.0))  # type: ignore[arg-type]
    assert [each.failures for each in found] == [{OURS: "out of time"}]
    assert freed == (["cuda"] if device == "cuda" else [])


def fail(_: object) -> object:
    raise ValueError("this shape is not supported\nat all")


def make_suite(name: str, *errors: float | Callable[[], float], build: Callable[..., Case] | None = None) -> OpSuite:
    def build_case(device: torch.device) -> Case:
        assert device == CPU
        candidates = {name: lambda index, name=name: name for name in SECONDS if name != "ceiling"}
        return Case(1, 0, 3, {**candidates, "broken": fail}, {"absent": "no module named absent"})

    checks = [
        Check(f"check {i}", error if callable(error) else lambda error=error: error, 0.1)
        for i, error in enumerate(errors)
    ]
    return OpSuite(name, lambda device: checks, (CaseSpec(f"{name} shape", build or build_case),))


def run(
    suites: list[OpSuite], directory: Path, deadline: float = math.inf, time_anyway: bool = False
) -> tuple[list[bool], list[dict]]:
    measured = timer.measure_ceilings(ToldTimer(), CPU)
    record = RunRecord(directory, CPU, measured, "a command", 7)
    are_right = [run_suite(suite, CPU, ToldTimer(), measured, record, deadline, time_anyway) for suite in suites]
    return are_right, read_records(directory)


def read_records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "gpu.jsonl").read_text().splitlines()]


def test_right_op_is_timed_beside_its_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    are_right, records = run([make_suite("op", 0.0, 0.1)], tmp_path / "results")
    assert are_right == [True]
    assert [record.get("check") or record["op"] for record in records] == ["op", "op", "op"]
    case = records[2]
    # One byte at 2000 bytes a second.
    assert case["floor_us"] == 500.0
    assert case["ceiling_fraction"] == 250.0
    assert (case["best_baseline"], case["speedup"]) == ("fast", 1.5)
    assert case["candidates"]["slow"] == {"us": 8.0, "spread": 0.01, "is_graphed": False}
    assert case["not_run"]["absent"] == "no module named absent"
    assert case["not_run"]["broken"].startswith("ValueError: this shape is not supported (fail:")
    assert case["ceilings"] == {"bytes_per_s": 2000.0, "matmul_flop_per_s": 1024.0}
    assert case["versions"]["torch"] == str(torch.__version__)
    output = capsys.readouterr().out
    [line] = [line for line in output.splitlines() if "op shape" in line and "fast 3.0" in line]
    assert "fast 3.0 (×1.50), headrace/other 1.0 (×0.50), slow 8.0* (×4.00), absent: -, broken: -" in line
    assert output.count("not run: broken") == 1


@pytest.mark.parametrize("error", [0.11, math.nan, fail], ids=["large", "nan", "raises"])
def test_wrong_op_is_not_timed_and_the_others_are(
    error: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (lambda: error(None)) if callable(error) else error
    are_right, records = run([make_suite("wrong", 0.0, wrong), make_suite("right", 0.0)], tmp_path)
    assert are_right == [False, True]
    assert [record["op"] for record in records if "op" in record] == ["right"]
    assert [record["is_right"] for record in records if "check" in record] == [True, False, True]
    assert "WRONG wrong            check 1" in capsys.readouterr().out


def test_wrong_op_is_timed_anyway_where_that_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, records = run([make_suite("wrong", 0.5), make_suite("right", 0.0)], tmp_path, time_anyway=True)
    cases = {
        record["op"]: (record["candidates"][OURS]["us"], record["is_right"]) for record in records if "op" in record
    }
    assert cases == {"wrong": (2.0, False), "right": (2.0, True)}
    assert capsys.readouterr().out.count("WRONG RESULTS") == 1


def test_case_that_cannot_be_built_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, records = run([make_suite("big", 0.0, build=fail), make_suite("op", 0.0)], tmp_path)
    assert records[1]["not_run"][OURS].startswith("ValueError: this shape is not supported")
    assert records[1]["speedup"] is None
    assert "this shape is not supported" in capsys.readouterr().out
    assert records[3]["speedup"] == 1.5


def told(directory: Path, **options: bool) -> dict[str, object]:
    common = {"bench": "tests.ops.bench.gpu.breaking_suites", "directory": str(directory), "command": "a command"}
    return common | {"process": 7, "checks_only": False, "time_anyway": False} | options


def timed(records: list[dict]) -> list[str]:
    return [record["shape"] for record in records if "op" in record and OURS in record["candidates"]]


def test_process_that_breaks_is_told_of() -> None:
    """A process without torch, which starts at once."""
    reasons = {
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "its process was ended by SIGSEGV",
        "import os; os._exit(7)": "its process ended with exit code 7",
        "import time; time.sleep(600)": "killed: it ran longer than 2 s",
    }
    for code, reason in reasons.items():
        with pytest.raises(JobFailedError, match=reason):
            run_apart(["timeit", "-n", "1", "-r", "1", code], 2.0)
    assert run_apart(["timeit", "-n", "1", "-r", "1", "import os; os._exit(3)"], 60.0, (0, WRONG)) == WRONG


def test_suites_that_break_their_process_leave_the_others_and_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_apart(arguments: list[str], limit_s: float, ends: tuple[int, ...]) -> int:
        suite = json.loads(arguments[1])["suite"]
        if suite == "crashing":
            raise JobFailedError("its process was ended by SIGSEGV")
        RunRecord(tmp_path, CPU, None, "a command", 7).append(CheckResult(suite, "shape", 0.0, 0.1))
        return WRONG if suite == "wrong" else 0

    monkeypatch.setattr(suite_run, "run_apart", run_apart)
    verdicts = run_suites(["wrong", "crashing", "right"], told(tmp_path), limit_s=60.0, suite_limit_s=5.0)
    assert (verdicts.failed, verdicts.wrong) == ({"crashing": "its process was ended by SIGSEGV"}, ["wrong"])
    assert not verdicts.is_good
    assert not Verdicts(failed=verdicts.failed).is_good
    assert not Verdicts(wrong=["wrong"]).is_good
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(row["check"], row["shape"], row["is_right"]) for row in rows] == [
        ("wrong", "shape", True),
        ("crashing", "process", False),
        ("right", "shape", True),
    ]
    assert [rows[1][name] for name in ("machine", "process")] == [rows[0][name] for name in ("machine", "process")]
    assert "FAILED crashing: its process was ended by SIGSEGV" in capfd.readouterr().out


def test_no_suite_starts_after_the_limit(tmp_path: Path) -> None:
    verdicts = run_suites(["wrong", "right"], told(tmp_path), limit_s=0.0, suite_limit_s=10.0)
    assert verdicts.late == ["wrong", "right"]
    assert verdicts.is_good
    assert not (tmp_path / "gpu.jsonl").exists()
    assert str(verdicts) == "no op was wrong; no time was left for: wrong, right"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_suites_that_crash_or_poison_their_process_leave_the_results_of_the_others(tmp_path: Path) -> None:
    verdicts = run_suites(["crashing", "poisoned", "wrong", "right"], told(tmp_path), 500.0, 300.0)
    records = read_records(tmp_path)
    assert timed(records) == ["right first", "right second"]
    assert verdicts.failed == {"crashing": "its process was ended by SIGSEGV"}
    assert verdicts.wrong == ["wrong"]
    reasons = [record["not_run"][OURS] for record in records if record.get("op") == "poisoned"]
    assert len(reasons) == 2
    assert all("illegal memory access" in reason for reason in reasons)
    run_suites(["crashing"], told(tmp_path / "checks", checks_only=True), 500.0, 300.0)
    assert [(record["check"], record["is_right"]) for record in read_records(tmp_path / "checks")] == [
        ("crashing", True)
    ]


def test_no_case_or_candidate_starts_after_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(suite_run, "time", SimpleNamespace(monotonic=lambda: now))

    def build_late(device: torch.device) -> Case:
        nonlocal now
        now = 2.0
        return Case(1, 0, 1, {OURS: lambda _: OURS, "slow": lambda _: "slow"})

    suite = make_suite("op", 0.0, build=build_late)
    suite = replace(suite, cases=(suite.cases[0], replace(suite.cases[0], label="second")))
    _, records = run([suite], tmp_path, deadline=1.0)
    assert records[1]["candidates"][OURS]["us"] == 2.0
    assert records[1]["not_run"] == {"slow": "out of time"}
    assert records[2]["not_run"] == {OURS: "out of time"}


def test_whole_step_reports_tokens_and_idle_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(device: torch.device) -> Case:
        return Case(
            1,
            0,
            1,
            {OURS: lambda _: [9e-6, 8e-6, 1e-5], OURS_ON_DEVICE: lambda _: OURS, "slow": lambda _: "slow"},
            clocks={OURS: Clock.OWN, "slow": Clock.EVENTS},
            num_tokens=18,
        )

    _, records = run([make_suite("step", 0.0, build=build)], tmp_path)
    assert records[1]["candidates"][OURS]["us"] == 9.0
    assert records[1]["idle_share"] == pytest.approx(7 / 9, abs=1e-3)
    assert records[1]["tokens_per_s"] == 2e6
    assert (records[1]["best_baseline"], records[1]["speedup"]) == ("slow", 0.889)
    assert "2000000 tokens/s, device idle 77.8%, slow 8.0*" in capsys.readouterr().out


def test_dry_run_lists_the_suites_whose_names_begin_so_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--only", "sampl", "--only", "logits"]) == 2
    captured = capsys.readouterr()
    assert [line.split(":")[0] for line in captured.out.splitlines()] == ["sampling", "logits_bitmask"]
    assert captured.out.startswith("sampling: 128x128256 plain")
    assert "--dry-run was given" in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_unknown_op_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "decode_attention" in capsys.readouterr().err


def test_bench_and_tuner_need_only_what_a_bare_gpu_machine_has() -> None:
    blocked = ("msgspec", "nats", "uvloop", "click", "starlette", "transformers", "triton", "gpu_worker")
    code = """
from ops.bench.gpu.__main__ import main
from ops.bench.gpu.tune.__main__ import main as tune
assert main(["--dry-run"]) == 2
sys.exit(tune([]))
"""
    done = run_without(blocked, code)
    assert done.returncode == 2, done.stderr
    assert "torch finds no CUDA device" in done.stderr
    assert "dense_linear: " in done.stdout


def test_memory_is_poisoned_and_warnings_of_that_are_not_shown() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        # As operations warn that have no deterministic form.
        warnings.warn("of an operation", stacklevel=1)
    assert not torch.are_deterministic_algorithms_enabled()
