"""What a runner generates in every form, against transformers and each sequence alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import load, make_device_runner
from tests.gpu_worker.execution.engine_run import (
    MAX_LEN,
    Outcome,
    greedy_by_transformers,
    make_runner,
    make_sequence,
    random_prompt,
    run,
    scheduler_config,
)

LENGTHS = [1, 3, 4, 5, 17, 40, 64, 90, 33, 8]
NUM_GREEDY = 30
# Settings of a run that make the steps different, not the tokens.
TRAFFIC: dict[str, dict[str, int]] = {
    "whole-batch": {},
    "chunks-amid-decodes": {"token_budget": 9, "max_num_seqs": 7, "arrivals_per_step": 1},
    "few-rows": {"max_num_seqs": 3},
    "preemptions": {"num_blocks": 42, "headroom_tokens": 0},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.02},
    {"top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "logit_bias": {3: 2.0, 10_000: 5.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {5: 4.0}, "logprobs": 2},
    {"logprobs": 4, "prompt_logprobs": 3, "top_k": 5},
    {"logprobs": 0, "min_p": 0.3, "frequency_penalty": -0.5},
    {"temperature": 1e-9, "top_p": 0.1},
]


@pytest.fixture(scope="module")
def cpu_runner(directory: Path) -> TorchModelRunner:
    return make_runner(directory)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    shared = random_prompt(24, seed=99)
    alone = [random_prompt(length, seed=length) for length in LENGTHS]
    return alone + [shared + random_prompt(length, seed=length + 1000) for length in (1, 7, 20)]


def greedy(prompts: list[list[int]]) -> list[Sequence]:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_GREEDY)
    return [make_sequence(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def greedy_tokens(tiny: tuple[Path, Any], prompts: list[list[int]]) -> dict[str, list[int]]:
    return {str(i): greedy_by_transformers(tiny[1], prompt, NUM_GREEDY) for i, prompt in enumerate(prompts)}


def seeded() -> list[Sequence]:
    return [
        make_sequence(
            str(index),
            random_prompt(5 + index % 20, seed=index),
            Sampling(**{"max_tokens": 24, "seed": index - 10, "temperature": 0.9, **OPTIONS[index % len(OPTIONS)]}),
        )
        for index in range(33)
    ]


@pytest.fixture(scope="module")
def seeded_outcome(cpu_runner: TorchModelRunner) -> Outcome:
    return run(cpu_runner, seeded())


def test_seeded_tokens_in_a_batch_equal_those_alone(cpu_runner: TorchModelRunner, seeded_outcome: Outcome) -> None:
    for sequence in seeded():
        assert run(cpu_runner, [sequence]).tokens[sequence.id] == seeded_outcome.tokens[sequence.id]


FORMS: dict[str, dict[str, Any]] = {
    "synchronous": {"is_graphed": False, "is_asynchronous": False},
    "eager-1": {"is_graphed": False, "depth": 1},
    "eager-2": {"is_graphed": False},
    "graphed-1": {"is_graphed": True, "depth": 1},
    "graphed-2": {"is_graphed": True},
}
"""How a runner works with its device, and how many steps are in flight."""

# Each form in the traffic that moves rows most, and the simplest and the most asynchronous one in all.
RUNS = [
    pytest.param(traffic, form, marks=[] if form in ("synchronous", "graphed-2") or place % 2 else pytest.mark.slow)
    for place, traffic in enumerate(TRAFFIC)
    for form in FORMS
]


@pytest.mark.parametrize(("traffic", "form"), RUNS)
def test_greedy_tokens_equal_transformers(
    model: CausalLM, prompts: list[list[int]], greedy_tokens: dict[str, list[int]], traffic: str, form: str
) -> None:
    runner = make_device_runner(model, **FORMS[form])
    outcome = run(runner, greedy(prompts), **TRAFFIC[traffic])
    assert outcome.tokens == greedy_tokens
    assert outcome.num_preemptions > 3 or traffic != "preemptions"


@pytest.mark.parametrize("form", ["synchronous", "graphed-1", "graphed-2"])
def test_prefix_hits_equal_transformers(
    model: CausalLM, prompts: list[list[int]], greedy_tokens: dict[str, list[int]], form: str
) -> None:
    runner = make_device_runner(model, **FORMS[form])
    outcome = run(runner, greedy(prompts * 2), max_num_seqs=3)
    again = {str(int(name) + len(prompts)): tokens for name, tokens in greedy_tokens.items()}
    assert outcome.tokens == greedy_tokens | again
    assert outcome.num_prefix_hits > 200


@pytest.mark.parametrize(("traffic", "form"), RUNS)
def test_sampled_tokens_and_logprobs_equal_those_of_a_cpu(
    model: CausalLM, seeded_outcome: Outcome, traffic: str, form: str
) -> None:
    runner = make_device_runner(model, **FORMS[form])
    outcome = run(runner, seeded(), **TRAFFIC[traffic])
    assert outcome.tokens == seeded_outcome.tokens
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) > 30
    for kind in ("logprobs", "prompt_logprobs"):
        for name, expected in getattr(seeded_outcome, kind).items():
            entries = getattr(outcome, kind)[name]
            assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
            for entry, other in zip(entries, expected, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert dict(entry.top) == pytest.approx(dict(other.top), abs=1e-4)


@pytest.mark.parametrize("token_budget", [1, 2])
def test_chunks_of_one_token_are_not_taken_for_decodes(model: CausalLM, token_budget: int) -> None:
    """Alone, and beside the decode of another sequence."""

    def sequences() -> list[Sequence]:
        sampling = Sampling(temperature=0.0, max_tokens=4)
        return [make_sequence(str(index), random_prompt(6, seed=index), sampling) for index in range(2)]

    expected = run(make_device_runner(model, is_graphed=False), sequences())

    outcome = run(make_device_runner(model, is_graphed=True), sequences(), token_budget=token_budget)

    assert outcome.tokens == expected.tokens


def test_resumed_sequences_continue_with_the_same_tokens(model: CausalLM, seeded_outcome: Outcome) -> None:
    runner = make_device_runner(model, is_graphed=True)
    resumed = [
        make_sequence(s.id, s.token_ids, s.sampling, tuple(seeded_outcome.tokens[s.id][: index % 23]))
        for index, s in enumerate(seeded())
    ]
    outcome = run(runner, resumed, token_budget=50)
    for index, sequence in enumerate(resumed):
        assert outcome.tokens[sequence.id] == seeded_outcome.tokens[sequence.id][index % 23 :]


def test_prompt_logprobs_longer_than_their_tile_equal_transformers(
    model: CausalLM, tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.execution.sampling.logprobs._ROWS", 7)
    prompt = random_prompt(50, seed=1)
    sequence = make_sequence("a", prompt, Sampling(temperature=0.0, prompt_logprobs=0))
    sequence.max_tokens = 0
    outcome = run(make_device_runner(model, is_graphed=True), [sequence], token_budget=20)
    with torch.inference_mode():
        exact = torch.log_softmax(tiny[1](torch.tensor([prompt])).logits[0], -1)
    entries = outcome.prompt_logprobs["a"]
    assert [entry.token_id for entry in entries] == prompt[1:]
    expected = [exact[position, token].item() for position, token in enumerate(prompt[1:])]
    assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-4)
    assert outcome.tokens["a"] == []


def test_logprobs_equal_transformers(tiny: tuple[Path, Any], cpu_runner: TorchModelRunner) -> None:
    prompt = random_prompt(50, seed=1)
    sampling = Sampling(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=3)
    sequences = [make_sequence("a", prompt, sampling), *greedy([prompt[:9], prompt])]
    outcome = run(cpu_runner, sequences, token_budget=7 + 3)
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


def test_bfloat16_follows_transformers_closely(tiny: tuple[Path, Any]) -> None:
    prompt = random_prompt(90, seed=90)
    sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outcome = run(make_runner(tiny[0], dtype="bfloat16"), [make_sequence("a", prompt, sampling)], token_budget=50)
    with torch.inference_mode():
        exact = torch.log_softmax(tiny[1](torch.tensor([prompt])).logits[0].float(), -1)
    entries = enumerate(outcome.prompt_logprobs["a"])
    difference = [abs(entry.logprob - exact[position, entry.token_id].item()) for position, entry in entries]
    assert sum(difference) / len(difference) < 0.3


def test_shorter_max_model_len_is_kept_and_needs_its_blocks(directory: Path) -> None:
    assert make_runner(directory, max_model_len=50).max_model_len == 50
    assert make_runner(directory, max_model_len=5000).max_model_len == MAX_LEN
    with pytest.raises(ConfigError, match="HEADRACE_MAX_MODEL_LEN to 80"):
        make_runner(directory, num_blocks=20)


def test_step_that_a_graph_captures_reads_contexts_as_long_as_the_model_allows(
    monkeypatch: pytest.MonkeyPatch, cpu_runner: TorchModelRunner
) -> None:
    found: list[int] = []

    def forward(step: object, max_context_len: int, inputs: object, *, knows_tokens: bool) -> torch.Tensor:
        found.append(max_context_len)
        return torch.empty(0)

    monkeypatch.setattr(cpu_runner, "_forward", forward)
    cpu_runner._compute(cast("Any", None), cast("Any", SimpleNamespace(has_logits=False, num_expanded_blocks=0)))
    assert found == [MAX_LEN]


def test_sequences_that_end_in_flight_change_nobody_else(
    model: CausalLM, prompts: list[list[int]], greedy_tokens: dict[str, list[int]]
) -> None:
    """Sequences stop at a token that only the result shows, or are aborted; others take their rows at once."""
    runner = make_device_runner(model, is_graphed=True)
    scheduler = Scheduler(scheduler_config(runner, 5, 32, num_blocks=150))
    engine, outcome = Engine(scheduler, runner), Outcome()
    sequences = greedy(prompts)
    for index, sequence in enumerate(sequences):
        if index % 3 == 0:
            sequence.eos_token_ids = frozenset(greedy_tokens[sequence.id][index : index + 1])
        engine.add(sequence)
    num_steps = 0
    while engine.has_work():
        num_steps += 1
        if num_steps in (5, 9):
            aborted = next(
                s for s in engine.scheduler.sequences if s.row is not None and s.id not in ("0", "3", "6", "9", "12")
            )
            engine.abort(aborted.id)
        for event in engine.step():
            outcome.add(event)
        assert engine.last_error is None
    for name, tokens in outcome.tokens.items():
        assert tokens == greedy_tokens[name][: len(tokens)]
    assert sum(len(tokens) == NUM_GREEDY for tokens in outcome.tokens.values()) >= 5


@pytest.mark.parametrize("depth", [1, 2])
def test_step_that_cannot_be_launched_is_computed_again(
    model: CausalLM,
    prompts: list[list[int]],
    greedy_tokens: dict[str, list[int]],
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_device_runner(model, is_graphed=False, depth=depth, max_num_seqs=4)
    scheduler = Scheduler(scheduler_config(runner, 4, 32, num_blocks=150))
    engine, outcome = Engine(scheduler, runner), Outcome()
    for sequence in greedy(prompts):
        engine.add(sequence)
    forward, num_launches = runner._forward, 0

    def break_down(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 12:
            raise RuntimeError("no memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(runner, "_forward", break_down)
    while engine.has_work():
        for event in engine.step():
            outcome.add(event)
    assert engine.stats.num_failed_steps == 1
    assert outcome.tokens == greedy_tokens


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_warm_up_leaves_generation_unchanged(model: CausalLM, seeded_outcome: Outcome, is_graphed: bool) -> None:
    runner = make_device_runner(model, is_graphed=False)
    runner.warm_up()
    if is_graphed:
        progress: list[tuple[int, int]] = []
        runner.capture_graphs(lambda done, total: progress.append((done, total)))
        assert progress == [(done, len(progress)) for done in range(1, len(progress) + 1)]
    assert run(runner, seeded()).tokens == seeded_outcome.tokens


def test_plain_torch_generates_the_same(
    directory: Path, seeded_outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references take padding as the kernels do."""
    modules = ("gpu_worker.models.decoder", "kernels.paged_attention.dispatch", "kernels.rope_kv_write.dispatch")
    for module in modules:
        monkeypatch.setattr(f"{module}.cpu_library", lambda: None)
    runner = make_device_runner(load(directory, "cpu"), is_graphed=True)
    assert run(runner, seeded(), token_budget=20, max_num_seqs=19).tokens == seeded_outcome.tokens
