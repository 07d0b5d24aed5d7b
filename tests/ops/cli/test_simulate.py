from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli.simulate import command
from ops.simulation.profile import Profile, WorkerLimits, write_profile
from ops.simulation.step_time import HostTimes, LinearTimes, Spread
from shared.errors import HeadraceError
from tests.ops.cli.command import headrace_here
from tests.ops.sizing.models import LLAMA_33_70B, write_config


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    worker = WorkerLimits(16, 500, 8, 256, 2048)
    spread = Spread((0.9, 1.1), (0.9, 1.1))
    write_profile(Profile("a test", LinearTimes(0.008), HostTimes(0.002), 0.004, worker, 0.0, spread), path)
    return path


def simulated(*arguments: object) -> Any:
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_measured_profile_is_simulated_the_same_each_time(profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    load = ("--profile", profile, "--requests", 100, "--rate", 10, "--prompt", 50, "--output", 20, "--price", 2)
    first, again = (simulated(*load, "--json", "--html", page) for _ in range(2))
    assert first == again
    told = json.loads(first)
    assert told["served"] == 100
    assert told["itl_p50_ms"] == pytest.approx(10, rel=0.1)
    # A prompt takes a step, which may have to wait for the one under way; the way there and back is 4 ms.
    assert 14 <= told["ttft_p50_ms"] <= 24
    assert told["cost_per_hour"] == 2
    assert "<svg" in page.read_text()
    assert "100 of 100 served" in simulated(*load)


def test_fleet_in_cells_serves_all_requests(profile: Path) -> None:
    load = ("--profile", profile, "--workers", 4, "--cells", 2, "--requests", 60, "--rate", 20, "--output", 20)
    told = json.loads(simulated(*load, "--json"))
    assert (told["workers"], told["served"]) == (4, 60)


def test_trace_and_deaths_are_simulated(profile: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"at": n / 10, "prompt": 40, "output": 30}) for n in range(100)))
    told = json.loads(simulated("--profile", profile, "--trace", trace, "--workers", 2, "--kill", "1@5.05", "--json"))
    assert (told["served"], told["unserved"]) == (100, 0)
    assert told["moved"] > 0


def test_fleet_that_dies_before_it_serves_shows_no_times_and_fails(profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = ["--profile", profile, "--requests", 50, "--rate", 5, "--kill", "0@1", "--retries", 0]
    words = [str(each) for each in [*arguments, "--html", page]]
    shown, told = (headrace_here("simulate", *words, *more) for more in ([], ["--json"]))
    assert (shown.returncode, told.returncode) == (1, 1)
    figures = json.loads(told.stdout)
    assert figures["served"] == 0
    assert {figures[name] for name in ("ttft_p50_ms", "itl_p99_ms", "answer_p99_ms")} == {None}
    rows = dict(line.split("  ", 1) for line in shown.stdout.splitlines())
    dashes = [name for name, value in rows.items() if value.strip() == "-"]
    assert [name.split(",")[0] for name in dashes] == [
        *("throughput", "time to first token", "between tokens", "whole answer"),
        *("prompt tokens from the cache", "devices computing", "blocks in use"),
    ]
    assert rows["requests"].strip() == "0 of 50 served"
    assert figures["unserved"] > 0
    assert rows["never served"].strip() == f"{figures['unserved']} waited for ever: all workers of their cell are dead"
    assert "never served" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--kill", "2@5"), "--kill: there is no worker 2; they are 0 to 0"),
        (("--kill", "soon"), "--kill: 'soon' is not a worker and a second, like 3@60"),
        (
            ("--html", "/nonexistent/x.html"),
            "--html: /nonexistent/x.html cannot be written: No such file or directory",
        ),
        (("--workers", "3", "--cells", "2"), "--cells: is 2; give --workers, a multiple of 2 (it is 3)"),
        (("--shared-prefix", "50"), "--shared-prefix: is 50; it must be less than --prompt (50)"),
    ],
)
def test_contradiction_is_named(profile: Path, arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        simulated("--profile", profile, "--prompt", 50, *arguments)
    assert str(refused.value) == problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        *(
            ((f"--{name}", "1", "--trace", "x"), f"--{name}: is not read with --trace, which tells when")
            for name in ["rate", "prompt", "output", "spread", "burstiness", "tenants", "shared-prefix", "prefixes"]
        ),
        *(
            ((f"--{name}", value, "--profile", "x"), f"--{name}: is not read with --profile, which is of a worker")
            for name, value in {
                **dict.fromkeys(("model", "device", "max-num-seqs", "max-num-batched-tokens", "max-model-len"), "2"),
                **dict.fromkeys(("weights", "cache-dtype"), "fp8"),
                "gpu-memory-utilization": "0.5",
            }.items()
        ),
        (
            ("--tensor-parallel-size", "2", "--profile", "x"),
            "--tensor-parallel-size: is not read with --profile unless --price is given",
        ),
        (("--burstiness", "2"), "--burstiness: is not read without --rate"),
        (("--prefixes", "2", "--rate", "1"), "--prefixes: is not read without --shared-prefix"),
    ],
)
def test_option_that_would_not_be_read_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        simulated(*arguments)
    assert str(refused.value).startswith(problem)


def test_variable_that_is_not_read_is_of_another_command_and_no_mistake(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MODEL", "a model")
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "4")
    assert "5 of 5 served" in simulated("--profile", profile, "--requests", 5)


def test_trace_is_simulated_whole_or_as_many_requests_as_are_asked_for(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.cli.simulate._REQUESTS", 3)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"at": n / 1000, "prompt": 1, "output": 1}) for n in range(9)))
    ask = ("--profile", profile, "--trace", trace)
    assert "9 of 9 served" in simulated(*ask)
    assert "7 of 7 served" in simulated(*ask, "--requests", 7)
    with pytest.raises(HeadraceError, match=r"trace\.jsonl: has 9 requests; --requests is 10$"):
        simulated(*ask, "--requests", 10)


def test_model_that_does_not_fit_is_told_with_what_takes_less(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_33_70B, "llama.json")
    fixes = "give --weights fp8 or --tensor-parallel-size 2"
    with pytest.raises(HeadraceError, match=rf"^--device: 1 x h200: 141\.1 GB of weights .*; {fixes}$"):
        simulated("--model", model)
    fitting = ("--weights", "fp8", "--max-model-len", 4096, "--requests", 1)
    assert "1 of 1 served" in simulated("--model", model, *fitting)


def test_without_model_and_profile_nothing_is_guessed() -> None:
    with pytest.raises(HeadraceError, match="is required, or --profile"):
        simulated()


@pytest.mark.parametrize("content", ["{}", "[", '{"measured_on": 1}'])
def test_file_that_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(HeadraceError, match="is not a profile"):
        simulated("--profile", tmp_path / "p")


def test_profile_of_negative_times_is_refused(profile: Path) -> None:
    profile.write_text(profile.read_text().replace("0.008", "-0.008"))
    with pytest.raises(HeadraceError, match="times are not negative"):
        simulated("--profile", profile)


def test_limit_that_prompts_exceed_is_named(profile: Path) -> None:
    done = CliRunner().invoke(command, ["--profile", str(profile), "--prompt", "3000", "--requests", "5"])
    assert "prompts that no worker holds" in done.output
    assert "5; the limit, --max-model-len or the profile's, is 2,048 with the answer" in done.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--device", "a100", "--weights", "fp8"), "--weights: is unsupported: a100 does not compute in FP8"),
        (
            ("--device", "a100", "--cache-dtype", "fp8"),
            "--cache-dtype: is unsupported: a100 does not compute in FP8; int8",
        ),
        (("--device", "a100"), "--device: 1 x a100: 141.1 GB .*; give --weights int4 or --tensor-parallel-size 2$"),
        (
            ("--weights", "fp8", "--gpu-memory-utilization", "0.6"),
            "leave .*; give --weights int4 or --tensor-parallel-size 2 or a smaller --max-model-len$",
        ),
    ],
)
def test_format_and_memory_of_a_device_are_checked_as_plan_does(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(HeadraceError, match=problem):
        simulated("--model", write_config(tmp_path, LLAMA_33_70B), *arguments)


def test_quantized_checkpoint_is_simulated_in_its_own_format_alone(tmp_path: Path) -> None:
    model = write_config(
        tmp_path, LLAMA_33_70B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    )
    with pytest.raises(HeadraceError, match="--weights: is bf16; the checkpoint stores about int4"):
        simulated("--model", model, "--weights", "bf16")
    load = ("--model", model, "--device", "h200", "--requests", 2, "--output", 2)
    assert simulated(*load) == simulated(*load, "--weights", "int4")
