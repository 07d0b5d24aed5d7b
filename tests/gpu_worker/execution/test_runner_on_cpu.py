from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import (
    MAX_LEN,
    make_runner,
    make_sequence,
    random_prompt,
    run,
)

LENGTHS = [1, 3, 4, 5, 17, 40, 64, 90, 33, 8]


@pytest.fixture(scope="module")
def runner(tiny: tuple[Path, Any]) -> TorchModelRunner:
    return make_runner(tiny[0])


def greedy_by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    result = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return result[0, len(prompt) :].tolist()


def greedy_sequences(prompts: list[list[int]], count: int) -> list[Sequence]:
    sampling = Sampling(temperature=0.0, max_tokens=count)
    return [make_sequence(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]


def as_lists(tokens: dict[str, list[int]], count: int) -> list[list[int]]:
    return [tokens[str(index)] for index in range(count)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shared = random_prompt(24, seed=99)
    alone = [random_prompt(length, seed=length) for length in LENGTHS]
    return alone + [shared + random_prompt(length, seed=length + 1000) for length in (1, 7, 20)]


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Any], prompts: list[list[int]]) -> list[list[int]]:
    return [greedy_by_transformers(tiny[1], prompt, 30) for prompt in prompts]


def test_plain_torch_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, runner: TorchModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    monkeypatch.setattr("kernels.paged_attention.dispatch.cpu_library", lambda: None)
    outcome = run(runner, greedy_sequences(prompts, 30), token_budget=20)
    assert as_lists(outcome.tokens, len(prompts)) == expected


SEEDED = [
    Sampling(max_tokens=24, seed=seed, temperature=0.9, **options)
    for seed, options in enumerate(
        [
            {},
            {"top_p": 0.9},
            {"top_k": 20},
            {"min_p": 0.02},
            {"top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2},
            {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
        ]
        * 6
    )
][:32]


def seeded_sequences() -> list[Sequence]:
    return [
        make_sequence(str(index), random_prompt(5 + index % 20, seed=index), sampling)
        for index, sampling in enumerate(SEEDED)
    ]


@pytest.fixture(scope="module")
def tokens_alone(runner: TorchModelRunner) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for sequence in seeded_sequences():
        tokens |= run(runner, [sequence]).tokens
    return tokens


def test_seeded_tokens_in_batch_equal_those_alone(runner: TorchModelRunner, tokens_alone: dict[str, list[int]]) -> None:
    assert run(runner, seeded_sequences()).tokens == tokens_alone
    assert run(runner, seeded_sequences()[::-1], token_budget=33, max_num_seqs=33).tokens == tokens_alone
    assert len({tuple(tokens) for tokens in tokens_alone.values()}) == 32


def test_seeded_tokens_after_preemption_equal_those_alone(
    runner: TorchModelRunner, tokens_alone: dict[str, list[int]]
) -> None:
    outcome = run(runner, seeded_sequences(), num_blocks=50, headroom_tokens=0)
    assert outcome.num_preemptions > 10
    assert outcome.tokens == tokens_alone


def test_seeded_tokens_resumed_elsewhere_equal_those_alone(
    tiny: tuple[Path, Any], tokens_alone: dict[str, list[int]]
) -> None:
    other_worker = make_runner(tiny[0], num_blocks=300)
    resumed = []
    for index, sequence in enumerate(seeded_sequences()):
        emitted = tuple(tokens_alone[sequence.id][: index % 23])
        resumed.append(
            make_sequence(sequence.id, sequence.token_ids[: sequence.num_prompt_tokens], sequence.sampling, emitted)
        )
    outcome = run(other_worker, resumed, token_budget=50)
    for index, sequence in enumerate(resumed):
        assert outcome.tokens[sequence.id] == tokens_alone[sequence.id][index % 23 :]


def test_logprobs_equal_transformers(tiny: tuple[Path, Any], runner: TorchModelRunner) -> None:
    prompt = random_prompt(50, seed=1)
    sampling = Sampling(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=3)
    sequences = [make_sequence("a", prompt, sampling), *greedy_sequences([prompt[:9], prompt], 9)]
    outcome = run(runner, sequences, token_budget=7 + 3)
    text = torch.tensor([prompt + outcome.tokens["a"]])
    with torch.inference_mode():
        exact = torch.log_softmax(tiny[1](text).logits[0].float(), -1)
    entries = [*outcome.prompt_logprobs["a"], *outcome.logprobs["a"]]
    assert len(outcome.prompt_logprobs["a"]) == 49
    assert [entry.token_id for entry in entries] == text[0, 1:].tolist()
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(exact[position, entry.token_id].item(), abs=1e-4)
        top = exact[position].topk(3 if position < 49 else 2)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert outcome.prompt_logprobs["0"] == []


def test_prompt_logprobs_without_generation_are_reported(runner: TorchModelRunner) -> None:
    sequence = make_sequence("a", random_prompt(20, seed=2), Sampling(prompt_logprobs=0))
    sequence.max_tokens = 0
    outcome = run(runner, [sequence], token_budget=40)
    assert len(outcome.prompt_logprobs["a"]) == 19
    assert outcome.tokens["a"] == []


def test_warm_up_leaves_generation_unchanged(
    tiny: tuple[Path, Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    fresh = make_runner(tiny[0])
    fresh.warm_up()
    outcome = run(fresh, greedy_sequences(prompts[:4], 30))
    assert as_lists(outcome.tokens, 4) == expected[:4]


def test_bfloat16_follows_transformers_closely(tiny: tuple[Path, Any], prompts: list[list[int]]) -> None:
    half = make_runner(tiny[0], dtype="bfloat16")
    sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outcome = run(half, [make_sequence("a", prompts[7], sampling)], token_budget=50)
    with torch.inference_mode():
        exact = torch.log_softmax(tiny[1](torch.tensor([prompts[7]])).logits[0].float(), -1)
    difference = [
        abs(entry.logprob - exact[position, entry.token_id].item())
        for position, entry in enumerate(outcome.prompt_logprobs["a"])
    ]
    assert sum(difference) / len(difference) < 0.3


def test_shorter_max_model_len_is_kept(tiny: tuple[Path, Any]) -> None:
    assert make_runner(tiny[0], max_model_len=50).max_model_len == 50
    assert make_runner(tiny[0], max_model_len=5000).max_model_len == MAX_LEN


def test_too_few_blocks_are_refused_with_what_to_change(tiny: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_MAX_MODEL_LEN to 80"):
        make_runner(tiny[0], num_blocks=20)


def test_step_that_a_graph_captures_reads_contexts_as_long_as_the_model_allows(
    monkeypatch: pytest.MonkeyPatch, runner: TorchModelRunner
) -> None:
    found: list[int] = []

    def forward(step: object, max_context_len: int, *, knows_tokens: bool) -> torch.Tensor:
        found.append(max_context_len)
        return torch.empty(0)

    monkeypatch.setattr(runner, "_forward", forward)
    runner._compute(cast("Any", None), cast("Any", SimpleNamespace(has_logits=False)))
    assert found == [MAX_LEN]
