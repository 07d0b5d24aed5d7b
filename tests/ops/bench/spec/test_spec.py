from __future__ import annotations

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.speculative.ngram.proposer import NgramProposer
from ops.bench.spec.__main__ import compare
from ops.bench.spec.loads import KnowingProposer, copying_prompts
from ops.stack.config import DEMO_MODEL


def make_runner() -> TorchModelRunner:
    runner = build_runner(RunnerConfig(DEMO_MODEL, num_blocks=100, max_num_seqs=2, max_model_len=500, num_threads=1))
    return runner


def test_prompts_that_copy_are_found_by_lookup_and_timed_beside_plain_decoding() -> None:
    prompts = copying_prompts(DEMO_MODEL, 2)
    assert prompts[0][:160] == prompts[0][160:320]
    row = compare(make_runner(), [prompts], 24, 3, 1, lambda _: NgramProposer(10_000), lessons=1).row()
    assert 0.5 < row["acceptance"] <= 1.0  # type: ignore[operator]
    assert row["plain_tokens_per_s"] > 0  # type: ignore[operator]


def test_known_drafts_are_right_as_often_as_asked_for() -> None:
    def known(answers: list[list[int]]) -> Proposer:
        return KnowingProposer(answers, 0.8, 4096)

    batches = [[prompt] for prompt in copying_prompts(DEMO_MODEL, 2)]
    comparison = compare(make_runner(), batches, 40, 3, 1, known, lessons=1)
    assert 0.65 < comparison.row()["acceptance"] < 0.95  # type: ignore[operator]
    assert comparison.fixed[0].num_steps < comparison.plain[0].num_steps
    assert comparison.fixed[0].drafting_share > 0.9
