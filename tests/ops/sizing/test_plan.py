from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.cli.plan import command
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.step_time import StepTimes
from ops.simulation.workload import Synthetic
from ops.sizing.devices import find_device
from ops.sizing.model_size import BLOCK_SIZE, ModelSize, read_model_size
from ops.sizing.plan import FULL_SHARE, Limits, Workload, options, rounded, steady
from ops.sizing.roofline import HOST_TIMES
from shared.errors import HeadraceError
from tests.architecture.source import ROOT
from tests.ops.sizing.models import LLAMA_31_8B, LLAMA_33_70B, QWEN3_30B_A3B, write_config

LOAD = Workload(20.0, 500, 200)
LIMITS = Limits(64, 2048, 1024, 0.9)


@pytest.fixture
def llama_8b(tmp_path: Path) -> ModelSize:
    return read_model_size(write_config(tmp_path, LLAMA_31_8B))


def test_workers_are_as_many_as_serve_the_load_with_a_reserve(llama_8b: ModelSize) -> None:
    found, _ = options(llama_8b, find_device("h200"), LOAD, LIMITS)
    for each in found:
        assert each.workers == math.ceil(LOAD.rate / (FULL_SHARE * each.most.requests_per_s))
        assert each.usual.requests_per_s >= LOAD.rate / each.workers
        assert each.devices == each.workers * each.ranks
    assert [each.devices for each in found] == sorted(each.devices for each in found)


def test_steady_state_serves_what_a_simulation_of_it_serves(llama_8b: ModelSize) -> None:
    """All requests at once, of lengths that differ, and the real scheduler decides which run."""
    (each, *_), _ = options(llama_8b, find_device("h200"), LOAD, LIMITS, (1,))
    config = SchedulerConfig(BLOCK_SIZE, each.num_blocks, 64, 2048, 1024)
    load = Synthetic(1500, math.inf, LOAD.prompt, LOAD.output, spread=0.3)
    outcome = simulate(Scenario(1, config, StepTimes(each.roofline, HOST_TIMES), ttft_slo_s=1e9), load.arrivals(1))
    assert each.most.batch == 64
    assert outcome.requests_per_s == pytest.approx(each.most.requests_per_s, rel=0.1)


def test_small_model_is_bounded_by_the_host_as_in_a_simulation() -> None:
    size = read_model_size(ROOT / "ops/demo_model/model")
    (each, *_), _ = options(size, find_device("h200"), LOAD, replace(LIMITS, max_num_seqs=16), (1,))
    config = SchedulerConfig(BLOCK_SIZE, each.num_blocks, 16, 2048, 1024)
    load = Synthetic(150, math.inf, LOAD.prompt, LOAD.output)
    outcome = simulate(Scenario(1, config, StepTimes(each.roofline, HOST_TIMES), ttft_slo_s=1e9), load.arrivals(1))
    assert outcome.requests_per_s == pytest.approx(each.most.requests_per_s, rel=0.15)


def test_limits_of_times_are_kept(llama_8b: ModelSize) -> None:
    found, _ = options(llama_8b, find_device("h200"), replace(LOAD, itl_s=0.006, ttft_s=0.1), LIMITS)
    assert all(each.most.itl_s <= 0.006 and each.most.ttft_s <= 0.1 for each in found)
    assert found
    none, reasons = options(llama_8b, find_device("h200"), replace(LOAD, itl_s=1e-6), LIMITS)
    assert not none
    assert any("keeps the times" in reason for reason in reasons)


def test_prompts_that_steps_cannot_keep_up_with_bound_the_batch(llama_8b: ModelSize) -> None:
    (each, *_), _ = options(llama_8b, find_device("h200"), replace(LOAD, prompt=900, output=2), LIMITS, (1,))
    assert each.most.batch < LIMITS.max_num_seqs
    assert steady(each.roofline, 64, replace(LOAD, prompt=900, output=1), 2048) is None


def test_format_that_the_device_does_not_compute_in_is_unsupported(llama_8b: ModelSize) -> None:
    found, reasons = options(llama_8b, find_device("a100"), LOAD, LIMITS, (1,))
    assert {each.weights for each in found} == {"bf16", "int4"}
    assert {each.cache for each in found} == {"bf16", "int8"}
    assert reasons == ["weights fp8: unsupported: a100 does not compute in FP8"]


def test_formats_of_weights_and_cache_are_combined_freely(llama_8b: ModelSize) -> None:
    found, _ = options(llama_8b, find_device("h200"), LOAD, LIMITS, (1,))
    assert {(each.weights, each.cache) for each in found} == set(product(("bf16", "fp8", "int4"), ("bf16", "fp8")))


def planned(*arguments: object) -> Any:
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_command_lists_options_and_draws_them(tmp_path: Path) -> None:
    model, page = write_config(tmp_path, LLAMA_33_70B, "llama.json"), tmp_path / "plan.html"
    told = planned("--model", model, "--device", "h200", "--rate", 20, "--price", 3, "--ranks", "1,2", "--html", page)
    assert "fp8" in told
    assert "not listed: bf16, cache bf16, 1 x h200: 141.1 GB of weights" in told
    assert page.read_text().count("<svg") == 2


def test_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_33_70B, "llama.json")
    load = ("--rate", 100, "--prompt", 500, "--output", 200, "--ttft-p99-ms", 1000, "--price", 3)
    page = (ROOT / "ops/docs/sizing.md").read_text(encoding="utf-8")
    assert f"```text\n{planned('--model', model, '--device', 'h200', *load)}\n" in page


def test_steps_shorter_than_the_worked_examples_are_marked(tmp_path: Path) -> None:
    few = planned("--model", write_config(tmp_path, QWEN3_30B_A3B), "--device", "h100", "--rate", 0.02, "--ranks", "1")
    assert all("* " in line for line in few.splitlines()[1:-1])
    assert few.splitlines()[-1].startswith("* shorter steps than the formulas were compared with")
    many = planned("--model", write_config(tmp_path, LLAMA_31_8B), "--device", "h200", "--rate", 1, "--ranks", "1")
    assert "\nbf16 " in many
    assert "*" not in next(line for line in many.splitlines() if line.startswith("bf16"))


def test_figures_of_a_small_model_keep_three_digits_and_reasons_are_sentences() -> None:
    told = planned("--model", ROOT / "ops/demo_model/model", "--ranks", "1,8")
    heads, first, *_ = told.splitlines()
    cells = dict(zip(re.split(r"  +", heads), re.split(r"  +", first), strict=True))
    for head in ("GB", "TTFT ms", "ITL ms"):
        assert 0 < float(cells[head].rstrip("*")) < 1
    assert "8 x h200: unsupported: 8 ranks cannot divide 4 attention heads and 2 KV heads" in told


@pytest.mark.parametrize(
    ("value", "decimals", "expected"), [(0.0, 1, 0.0), (0.02372, 2, 0.0237), (98.57, 1, 98.6), (1234.56, 2, 1234.56)]
)
def test_small_values_are_rounded_to_three_digits(value: float, decimals: int, expected: float) -> None:
    assert rounded(value, decimals) == expected


def test_plan_is_tried_until_its_times_hold_and_with_a_death(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_31_8B, "llama.json")
    load = ("--device", "l40s", "--rate", 4, "--prompt", 500, "--output", 50, "--ttft-p99-ms", 800)
    told = json.loads(planned("--model", model, *load, "--ranks", 1, "--max-num-seqs", 32, "--verify", "--json"))
    *alive, dead = told["simulated"]
    assert dead["name"].endswith("one dies")
    assert alive[0]["devices"] == told["options"][0]["devices"]
    assert any(each["ttft_p99_ms"] <= 800 for each in alive)
    assert dead["moved"] >= 0
    # As a share of what the workers could serve, not of the time in which any step runs.
    (option, *_), served = told["options"], alive[0]["devices"]
    assert float(alive[0]["load"].rstrip("%")) == pytest.approx(
        100 * 4 / (served * option["requests_per_s_at_most"]), abs=1
    )


def test_table_is_printed_before_it_is_verified_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.cli.status_line.TELL_EVERY_S", 0.0)
    model = write_config(tmp_path, LLAMA_31_8B, "llama.json")
    load = ("--device", "l40s", "--rate", "1", "--prompt", "50", "--output", "20", "--ranks", "1", "--verify")
    done = CliRunner().invoke(command, ["--model", str(model), *load], catch_exceptions=False)
    lines = done.output.splitlines()
    words = re.compile(r"1 workers: [\d,]+ requests have ended, [\d.]+ s are simulated")
    told = [place for place, line in enumerate(lines) if words.fullmatch(line)]
    computed = [place for place, line in enumerate(lines) if line.startswith(("bf16", "fp8", "int4"))]
    assert len(told) > 100
    assert computed
    assert max(computed) < min(told)
    rows = lines[next(place for place, line in enumerate(lines) if line.startswith("simulated")) + 1 :]
    assert [row.split("  ")[0] for row in rows][:2] == ["1 workers", "1 workers, one dies"]


def test_times_that_nothing_keeps_are_told_beside_those_that_could_be_kept(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA_31_8B)
    done = CliRunner().invoke(command, ["--model", str(model), "--ttft-p99-ms", "0.1", "--ranks", "1"])
    assert done.output.splitlines()[0] == "no option fits"
    assert re.search(r"the times that are asked for: TTFT [\d.]+ ms, ITL [\d.]+ ms\n", done.output)


def test_first_token_of_an_empty_queue_is_not_called_a_p99(tmp_path: Path) -> None:
    arguments = ["--model", str(write_config(tmp_path, LLAMA_31_8B)), "--ranks", "1"]
    for more, is_told in (([], False), (["--ttft-p99-ms", "500"], True)):
        done = CliRunner().invoke(command, [*arguments, *more])
        assert ("finds no queue; the p99 needs --verify" in done.stderr) == is_told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--model: is required"),
        (("--ranks", "1,x"), "--ranks: '1,x' is not a list"),
        (("--device", "v100"), "--device: 'v100' is unsupported"),
        (("--prompt", "4194304"), "--prompt: is 4194304; with --output 200 it exceeds the model's 131072 tokens"),
        (("--seed", "3"), "--seed: is not read without --verify"),
        (("--max-model-len", "300"), "--max-model-len: is 300; the load has 700"),
    ],
)
def test_unusable_setting_is_named(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    model = ("--model", str(write_config(tmp_path, LLAMA_31_8B))) if arguments else ()
    with pytest.raises(HeadraceError) as refused:
        planned(*model, *arguments)
    assert str(refused.value).startswith(problem)
