"""Whole steps at tiny sizes on the CPU: every check, every candidate, and the way into table and records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from ops.bench.gpu import timer as device_timer
from ops.bench.gpu.case import OURS, OURS_ON_DEVICE, PLAIN, Case, CaseSpec, Clock, OpSuite
from ops.bench.gpu.cases import steps
from ops.bench.gpu.results import RunRecord, check_lines
from ops.bench.gpu.run import check_op, run_suite
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step import correctness
from ops.bench.gpu.step import steps as step_cases
from ops.bench.gpu.step.random_model import model_config, random_model
from ops.bench.gpu.step.step_engine import ScriptedProposer, StepEngine
from ops.bench.gpu.step.step_floor import step_floor
from ops.bench.gpu.step.steps import (
    decode_case,
    matrices,
    prefill_case,
    prefix_cache_case,
    scripted_case,
    throughput_case,
    verification_case,
)
from ops.bench.gpu.suites import all_suites
from ops.bench.gpu.timer import Timing
from tests.ops.bench.bare_machine import run_without
from tests.ops.bench.gpu.step.tiny_models import CODES, CPU, DENSE, LLAMA, OTHER, QWEN, with_fields

# A field of each whose change the check of logits must notice.
WRONG: Mapping[str, dict[str, Any]] = {
    "qwen": {"rope_theta": 1e2},
    "moe": {"norm_topk_prob": False},
    "oss": {"sliding_window": 6},
    "mla": {"routed_scaling_factor": 1.1},
    "next": {"partial_rotary_factor": 0.5},
}
ALL = [*DENSE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER)]

CASES: dict[str, Callable[[torch.device], Case]] = {
    "decode": partial(decode_case, shape=QWEN, num_seqs=3, context=24, num_steps=8, num_peer_steps=4),
    "untied decode": partial(decode_case, shape=LLAMA, num_seqs=2, context=20, num_steps=8),
    "fp8 decode": partial(decode_case, shape=LLAMA, num_seqs=2, context=20, num_steps=8, rounded="fp8"),
    "int4 decode": partial(decode_case, shape=LLAMA, num_seqs=2, context=20, num_steps=8, rounded="int4"),
    "prefill": partial(prefill_case, shape=LLAMA, num_tokens=40, num_prompts=2),
    "throughput": partial(throughput_case, shape=QWEN, num_seqs=3, prompt=20, new=5, has_peer=True),
    "large throughput": partial(throughput_case, shape=QWEN, num_seqs=2, prompt=20, new=3, has_peer=False),
    "verification": partial(verification_case, shape=QWEN, num_seqs=3, context=24, num_steps=8, num_drafts=4),
    "scripted drafts": partial(scripted_case, shape=LLAMA, num_seqs=2, prompt=12, new=10, num_drafts=3, acceptance=0.7),
    "prefix cache": partial(prefix_cache_case, shape=QWEN, num_tokens=400, num_prompts=2),
}

for name, shape in OTHER.items():
    CASES[f"{name} decode"] = partial(decode_case, shape=shape, num_seqs=3, context=24, num_steps=8)
    CASES[f"{name} prefill"] = partial(prefill_case, shape=shape, num_tokens=40, num_prompts=2)

# `transformers` is timed beside these two, which takes most of their time; the others go the same way.
SLOW = {"decode", "throughput", *(name for name in CASES if name.split()[0] in OTHER)}


class WallTimer:
    """Times two calls by the clock."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        started = time.perf_counter()
        for index in range(2):
            assert call(index % num_sets) is not None
        return Timing.of([(time.perf_counter() - started) / 2], is_graphed=clock is Clock.GRAPH)


@pytest.fixture(autouse=True)
def one_thread_and_small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(device_timer, "_COPY_BYTES", 1000)
    monkeypatch.setattr(device_timer, "_MATRIX_SIZE", 8)


def run(suite: OpSuite, directory: Path) -> list[dict]:
    timer, measured = WallTimer(), device_timer.measure_ceilings(WallTimer(), CPU)
    record = RunRecord(directory, CPU, measured, "a command", 7)
    assert run_suite(suite, CPU, timer, measured, record, time.monotonic() + 60)
    return [json.loads(line) for line in (directory / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ALL)
def test_right_model_passes_the_checks(name: str) -> None:
    lengths, num_new = ((21, 9), 5) if name in DENSE else ((41, 9), 24)
    suite = OpSuite(
        "step", partial(steps.step_checks, shape=(DENSE | OTHER)[name], lengths=lengths, num_new=num_new), ()
    )
    results = check_op(suite, CPU)
    assert [result.is_right for result in results] == [True] * (3 if name == "oss" else 2), check_lines(results)


@pytest.mark.parametrize("name", ["qwen", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER)])
def test_wrong_model_fails_the_check_of_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_model(shape: ModelShape, *rest: Any, **options: Any) -> object:
        return random_model(with_fields(shape, **WRONG[name]), *rest, **options)

    monkeypatch.setattr(correctness, "random_model", wrong_model)
    shape = (DENSE | OTHER)[name].first(2).without(CODES)
    if shape.is_dense:
        assert correctness.cosine_error(CPU, shape, (21, 9)) > 1e-3
    else:
        assert correctness.routed_error(CPU, shape, (41, 9)) > 5e-3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_every_candidate_is_timed_and_recorded(name: str, tmp_path: Path) -> None:
    suite = OpSuite("step", lambda device: [], (CaseSpec(name, CASES[name]),))
    [record] = run(suite, tmp_path)
    assert {key: reason for key, reason in record["not_run"].items() if "too long" not in reason} == {}
    assert record["candidates"][OURS]["us"] > 0
    assert record["floor_us"] > 0
    assert len(record["candidates"]) > 1 or record["not_run"]


@pytest.mark.slow
def test_decode_step_reports_tokens_idle_share_and_peers(tmp_path: Path) -> None:
    suite = OpSuite("step", lambda device: [], (CaseSpec("decode", CASES["decode"]),))
    [record] = run(suite, tmp_path)
    ours, on_device = (record["candidates"][name]["us"] for name in (OURS, OURS_ON_DEVICE))
    assert record["idle_share"] == pytest.approx(1 - on_device / ours, abs=1e-3)
    assert record["tokens_per_s"] == pytest.approx(3e6 / ours, rel=1e-2)
    assert record["candidates"].keys() == {OURS, OURS_ON_DEVICE, "eager", "matrices", "generate_batch (sdpa)"}


def test_floor_of_a_decode_step_has_the_sequences_in_the_middle_of_the_timed_steps() -> None:
    case = CASES["untied decode"](CPU)
    _, weights = random_model(LLAMA, 8, CPU)
    looked_up = 2 * 300 * 64
    num_bytes = sum(size.num_bytes for size in weights.sizes.values()) - looked_up
    cached, odd = divmod(case.num_bytes - num_bytes, 2 * 2 * 2 * 2 * 16)
    assert odd == 0
    assert 2 * 20 <= cached <= 2 * (20 + 4)


def test_floor_of_a_load_reads_the_weights_once_for_each_token_behind_the_first() -> None:
    weights = random_model(QWEN, 8, CPU)[1]
    few, more = (throughput_case(CPU, QWEN, 2, 20, new, has_peer=False) for new in (3, 4))
    read = step_floor(model_config(QWEN, 8), weights.sizes, []).num_bytes
    # The context of the last token is 23, in each of two sequences.
    cached = step_floor(model_config(QWEN, 8), weights.sizes, [(1, 2 * 22)]).num_bytes - read
    assert more.num_bytes - few.num_bytes == pytest.approx(read + cached, rel=0.02)


@pytest.mark.parametrize("shape", [QWEN, LLAMA], ids=lambda shape: shape.name)
def test_matrices_end_with_the_scores_of_the_sampling_rows(shape: ModelShape) -> None:
    model, weights = random_model(shape, 8, CPU)
    scores = matrices(model, weights, num_tokens=5, num_sampling=2)(0)
    assert isinstance(scores, torch.Tensor)
    assert scores.shape == (2, shape.vocab_size)


def test_timed_steps_in_which_a_sequence_ends_are_refused() -> None:
    model, _ = random_model(QWEN, 64, CPU)
    engine = StepEngine(model, 2, 64)
    engine.fill(1, 20)
    engine.add(engine.random_prompt(20), 12)
    engine.step()
    with pytest.raises(RuntimeError, match="2 sequences were to decode, 1 are left"):
        engine.time_steps(16)


def test_prompt_in_the_cache_computes_only_its_end() -> None:
    model, _ = random_model(QWEN, 401, CPU)
    engine = StepEngine(model, 2, 401, token_budget=400, has_prefix_cache=True)
    prompt = engine.random_prompt(400)
    engine.serve_s([prompt], 1)
    sequence = engine.add(prompt[:396] + engine.random_prompt(4), 1)
    engine.run()
    assert sequence.num_cached_tokens == 384


def test_steps_with_scripted_drafts_make_as_many_tokens_as_the_script_says() -> None:
    model, _ = random_model(QWEN, 400, CPU)
    engine = StepEngine(model, 4, 400, num_drafts=4, proposer=ScriptedProposer(0.7, QWEN.vocab_size))
    engine.fill(4, 20)
    made = [sum(len(event.token_ids) for event in engine.step()) for _ in range(60)]
    assert sum(made) / (4 * 60) == pytest.approx(sum(0.7**number for number in range(5)), rel=0.1)


def test_steps_whose_drafts_are_all_wrong_make_a_token_a_sequence() -> None:
    case = CASES["verification"](CPU)
    assert {OURS, OURS_ON_DEVICE, PLAIN, f"{PLAIN}/device"} == case.candidates.keys()
    assert [len(case.candidates[name](0)) for name in (OURS_ON_DEVICE, f"{PLAIN}/device")] == [15, 3]


STEP_SUITES = [suite for suite in all_suites() if "step" in suite.name]


@pytest.mark.parametrize("suite", [*STEP_SUITES, steps.THROUGHPUT, steps.PREFIX_CACHE], ids=lambda suite: suite.name)
def test_cases_at_the_models_sizes_are_called_rightly(suite: OpSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("decode", "prefill", "verification", "scripted", "throughput", "prefix_cache"):
        case = f"{kind}_case"
        monkeypatch.setattr(step_cases, case, create_autospec(getattr(step_cases, case), return_value="built"))
    assert [spec.build(CPU) for spec in suite.cases] == ["built"] * len(suite.cases)


def test_missing_package_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_without_msgspec(name: str) -> object:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(steps, "import_module", import_without_msgspec)
    with pytest.raises(steps.MissingPackageError, match="whole steps need msgspec: python3 -m pip install msgspec"):
        steps.DECODE_8B.checks(CPU)


@pytest.mark.slow
def test_whole_steps_need_only_what_a_bare_gpu_machine_has() -> None:
    blocked = ("nats", "uvloop", "starlette", "uvicorn", "redis", "httptools", "prometheus_client")
    code = """
from ops.bench.gpu.cases.steps import load_step_module
for name in ("correctness", "steps"):
    load_step_module(name)
"""
    done = run_without(blocked, code)
    assert done.returncode == 0, done.stderr
