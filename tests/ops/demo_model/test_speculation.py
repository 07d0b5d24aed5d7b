"""Every proposer, with the demo model and its own drafts: answers are those without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.core.adaptive_depth import AdaptiveDepth
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer
from ops.bench.spec.__main__ import beginning_prompts, copying_prompts
from ops.bench.spec.fixed_depth import FixedDepth
from ops.stack.config import DEMO_MODEL
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import Outcome, run

NUM_PROMPTS = 240
RUNNER = RunnerConfig(DEMO_MODEL, block_size=4, num_blocks=6000, max_num_seqs=60, max_model_len=400, num_threads=1)
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_k": 40},
]


def load() -> TorchModelRunner:
    runner = build_runner(RUNNER)
    return runner


def sequences() -> list[Sequence]:
    half = NUM_PROMPTS // 2
    prompts = [prompt[:90] for prompt in beginning_prompts(DEMO_MODEL, half)] + copying_prompts(DEMO_MODEL, half)
    samplings = [
        Sampling(max_tokens=24, seed=seed, **SAMPLINGS[0 if seed % 2 else seed // 2 % len(SAMPLINGS)])  # type: ignore[arg-type]
        for seed in range(len(prompts))
    ]
    return [
        Sequence(str(i), list(prompt), len(prompt), sampling, max_tokens=24)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def answer(runner: TorchModelRunner, policy: DraftPolicy | None) -> Outcome:
    return run(runner, sequences(), policy=policy, token_budget=512, max_num_seqs=60, arrivals_per_step=7)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return answer(load(), None).tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FixedDepth(4), AdaptiveDepth(5)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("kind", ["ngram", "draft", "eagle"])
def test_answers_of_hundreds_of_prompts_are_those_without_drafts(
    kind: str, policy: DraftPolicy, plain: dict[str, list[int]]
) -> None:
    folder = DEMO_MODEL.parent / kind if kind in ("draft", "eagle") else None
    config = WorkerConfig(model=Path(DEMO_MODEL), speculative=kind, draft_model=folder)
    runner = load()
    runner.verify_drafts_of(build_proposer(config, RUNNER, runner))
    outcome = answer(runner, policy)
    assert outcome.tokens == plain
    assert outcome.speculation is not None
    if isinstance(policy, FixedDepth):
        assert outcome.speculation.num_accepted_tokens > 0.1 * outcome.speculation.num_drafts
