from __future__ import annotations

import pytest

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.speculative.ngram.proposer import NgramProposer
from ops.bench.gpu.step.step_engine import ScriptedProposer
from ops.bench.spec.__main__ import Way, compare, copying_prompts
from ops.stack.config import DEMO_MODEL


def make_runner() -> TorchModelRunner:
    runner = build_runner(RunnerConfig(DEMO_MODEL, num_blocks=100, max_num_seqs=2, max_model_len=500, num_threads=1))
    return runner


def test_prompts_that_copy_are_found_by_lookup_and_timed_beside_plain_decoding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = copying_prompts(DEMO_MODEL, 2)
    assert prompts[0][:160] == prompts[0][160:320]
    way = Way(NgramProposer(10_000), lambda count: prompts)
    row = compare(make_runner(), way, [prompts], 24, 3, 1, lessons=1).row()
    assert 0.5 < row["acceptance"] <= 1.0  # type: ignore[operator]
    assert row["plain_tokens_per_s"] > 0  # type: ignore[operator]
    assert not capsys.readouterr().err


def test_scripted_drafts_are_accepted_as_often_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [[prompt] for prompt in copying_prompts(DEMO_MODEL, 2)]
    way = Way(ScriptedProposer(0.8, 4096), lambda count: [])
    comparison = compare(make_runner(), way, batches, 40, 3, 1, lessons=1)
    assert 0.65 < comparison.row()["acceptance"] < 0.95  # type: ignore[operator]
    assert comparison.fixed[0].num_steps < comparison.plain[0].num_steps
    assert comparison.fixed[0].drafting_share > 0.9
    assert "2 of 2 answers differ" in capsys.readouterr().err
