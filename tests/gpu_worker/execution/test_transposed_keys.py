"""Blocks of 16 tokens, in which a CPU's keys lie transposed: the same tokens in any batch, resumed and with drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run

BLOCK = 16
NUM_TOKENS = 24
TRAFFIC: dict[str, dict[str, int]] = {
    "one-by-one": {"max_num_seqs": 1},
    "chunks": {"token_budget": 7, "arrivals_per_step": 1},
    "preemptions": {"num_blocks": 14, "headroom_tokens": 0},
}
PROMPTS = [random_prompt(17, seed=99) * (index % 2) + random_prompt(3 + 7 * index, seed=index) for index in range(9)]


def sequences() -> list[Sequence]:
    return [
        make_sequence(
            str(index), prompt, Sampling(temperature=0.9 * (index % 2), seed=index, max_tokens=NUM_TOKENS, logprobs=1)
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", params=["auto", "int8"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"block_size": BLOCK, "kv_cache_dtype": request.param}


@pytest.fixture(scope="module")
def runner(directory: Path, settings: dict[str, Any]) -> TorchModelRunner:
    runner = make_runner(directory, **settings)
    assert runner.cache.layers[0].keys.stride(1) == 1
    return runner


@pytest.fixture(scope="module")
def plain(runner: TorchModelRunner) -> Any:
    return run(runner, sequences())


def test_tokens_equal_those_of_blocks_of_four(directory: Path, settings: dict[str, Any], plain: Any) -> None:
    runner = make_runner(directory, kv_cache_dtype=settings["kv_cache_dtype"])
    assert runner.cache.layers[0].keys.is_contiguous()
    assert run(runner, sequences()).tokens == plain.tokens


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_tokens_and_their_bits_do_not_depend_on_the_traffic(runner: TorchModelRunner, plain: Any, traffic: str) -> None:
    outcome = run(runner, sequences(), **TRAFFIC[traffic])
    assert outcome.tokens == plain.tokens
    assert outcome.logprobs == plain.logprobs
    assert outcome.num_preemptions > 0 or traffic != "preemptions"


def test_resumed_sequences_continue_exactly(runner: TorchModelRunner, plain: Any) -> None:
    resumed = [
        make_sequence(sequence.id, sequence.token_ids, sequence.sampling, tuple(plain.tokens[sequence.id][: 5 + index]))
        for index, sequence in enumerate(sequences())
    ]
    outcome = run(runner, resumed)
    assert all(outcome.tokens[name] == tokens[5 + int(name) :] for name, tokens in plain.tokens.items())
