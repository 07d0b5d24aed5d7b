"""The engine on a KV cache in eight bits: the same tokens whatever the schedule, and nearly those of 16 or 32 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run

GREEDY = Sampling(temperature=0.0, max_tokens=30)
PROMPTS = [random_prompt(length, seed=length) for length in (1, 3, 4, 5, 17, 40, 64, 90, 33, 8)]
PROMPTS += [random_prompt(24, seed=99) + random_prompt(length, seed=length + 1000) for length in (1, 7, 20)]


def sequences(prompts: list[list[int]]) -> list[Sequence]:
    return [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def runner(request: pytest.FixtureRequest, directory: Path) -> TorchModelRunner:
    return make_runner(directory, kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def alone(runner: TorchModelRunner) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for sequence in sequences(PROMPTS):
        tokens |= run(runner, [sequence]).tokens
    assert len({tuple(found) for found in tokens.values()}) == len(PROMPTS)
    return tokens


def test_batch_says_what_each_says_alone(runner: TorchModelRunner, alone: dict[str, list[int]]) -> None:
    assert run(runner, sequences(PROMPTS)).tokens == alone


def test_logprobs_are_nearly_those_of_the_models_dtype(runner: TorchModelRunner, directory: Path) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = random_prompt(150, seed=3)
    found = []
    for some in (runner, make_runner(directory)):
        entries = run(some, [make_sequence("0", prompt, sampling)]).prompt_logprobs["0"]
        found.append(torch.tensor([entry.logprob for entry in entries]))
    difference = (found[0] - found[1]).abs().mean()
    # This random model's logits are sharp. fp8 has three bits of fraction, int8 seven below the largest.
    assert 0 < difference < (0.04 if runner.cache.layers[0].keys.dtype == torch.int8 else 0.2)


def test_plain_torch_says_the_same(
    monkeypatch: pytest.MonkeyPatch, runner: TorchModelRunner, directory: Path, alone: dict[str, list[int]]
) -> None:
    for module in ("paged_attention", "rope_kv_write"):
        monkeypatch.setattr(f"kernels.{module}.dispatch.cpu_library", lambda: None)
    monkeypatch.setattr("gpu_worker.layers.fused_decoder.cpu_library", lambda: None)
    dtype = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[runner.cache.layers[0].keys.dtype]
    plain = run(make_runner(directory, kv_cache_dtype=dtype), sequences(PROMPTS), token_budget=20)
    agreeing = sum(plain.tokens[name][:8] == tokens[:8] for name, tokens in alone.items())
    assert agreeing >= len(PROMPTS) - 2
