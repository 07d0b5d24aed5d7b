"""Sequences with several adapters and without share steps, blocks and drafts; each gets its own model's answer.

Adapters beside recurrent layers: log probabilities of merged weights, whose bits neither drafts nor room change.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.adapters.reader import read_adapter
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.fused_decoder import FusedDecoder
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from gpu_worker.speculative.ngram.proposer import NgramProposer
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer, with_room_for_proposer
from kernels.cpu_library import cpu_library
from ops.bench.spec.fixed_depth import FixedDepth
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, merge, write_adapter
from tests.gpu_worker.adapters.test_merged import place
from tests.gpu_worker.execution.engine_run import (
    BLOCK,
    VOCAB,
    Outcome,
    make_runner,
    random_prompt,
    run,
    save_tiny_model,
)
from tests.gpu_worker.models.recurrent_models import save_case
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.speculative.draft_files import eagle_config, eagle_tensors, save_draft
from tests.gpu_worker.structured_output.tiny_tokenizer import CHARACTERS, EOS, constraint_of

NUM_ADAPTERS = 3
GREEDY = Sampling(temperature=0.0, max_tokens=12)
# All begin alike: with blocks of one for another an answer would differ.
_SHARED = random_prompt(24, seed=1)
PROMPTS = [[*_SHARED, *random_prompt(length, seed=length)] for length in (0, 3, 9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Path]]:
    """A model, it and what it is with each adapter, and the adapters."""
    root = tmp_path_factory.mktemp("models")
    oracle = save_tiny_model(root / "model")
    sizes = linear_sizes(oracle)
    sizes.pop("lm_head")
    adapters = [write_adapter(root / str(i), sizes, rank=2 + 5 * i, seed=i) for i in range(NUM_ADAPTERS)]
    merged = []
    for adapter in adapters:
        merged.append(copy.deepcopy(oracle))
        merge(merged[-1], adapter)
    return root / "model", [oracle, *merged], adapters


def _runner(models: tuple[Path, list[Any], list[Path]], **settings: Any) -> TorchModelRunner:
    directory, _, adapters = models
    runner = make_runner(directory, max_model_len=96, dtype="float32", max_loras=NUM_ADAPTERS, **settings)
    for slot, adapter in enumerate(adapters):
        place(runner.model, slot, adapter)
    return runner


def _sequences(sampling: Sampling = GREEDY) -> list[Sequence]:
    found = []
    for i in range(12):
        slot = i % (NUM_ADAPTERS + 1)
        prompt = PROMPTS[i // 4]
        adapter, salt = (None, b"") if slot == 0 else (slot - 1, bytes([slot]))
        found.append(Sequence(str(i), list(prompt), len(prompt), sampling, max_tokens=12, adapter=adapter, salt=salt))
    return found


def _assert_greedy(tokens: dict[str, list[int]], oracles: list[Any]) -> None:
    for i in range(12):
        prompt, answer = PROMPTS[i // 4], tokens[str(i)]
        expected = oracle_logits(oracles[i % (NUM_ADAPTERS + 1)], torch.tensor([*prompt, *answer]))
        assert answer == expected[len(prompt) - 1 : -1].argmax(1).tolist()


def test_answers_are_those_of_merged_models_beside_preemptions_and_hits(
    models: tuple[Path, list[Any], list[Path]],
) -> None:
    runner = _runner(models)
    if cpu_library() is not None:
        assert isinstance(runner.model._decoder, FusedDecoder)
    outcome = run(runner, _sequences(), num_blocks=40, token_budget=24, arrivals_per_step=1, headroom_tokens=1)
    assert outcome.num_preemptions > 0
    assert outcome.num_prefix_hits > 0
    _assert_greedy(outcome.tokens, models[1])


def test_drafts_are_verified_by_the_adapter(models: tuple[Path, list[Any], list[Path]]) -> None:
    sequences, answers = _sequences(), run(_runner(models), _sequences()).tokens
    for i, sequence in enumerate(sequences):
        # The right answer, and from its middle on that of another model.
        sequence.prediction = (*answers[str(i)][:6], *answers[str((i + 1) % 12)][6:])
    runner = _runner(models, max_draft_tokens=4, proposer=NgramProposer(96))
    outcome = run(runner, sequences, policy=FixedDepth(4))
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens >= 12 * 3
    _assert_greedy(outcome.tokens, models[1])


@pytest.mark.parametrize("speculative", ["eagle", "draft"])
def test_drafts_of_a_layer_or_a_model_without_adapters_are_verified_by_the_adapter(
    models: tuple[Path, list[Any], list[Path]], speculative: str, tmp_path: Path
) -> None:
    draft_model = models[0]
    if speculative == "eagle":
        draft_model = tmp_path
        save_draft(draft_model, eagle_config(48, VOCAB), eagle_tensors(48))
    settings = WorkerConfig(speculative=speculative, draft_model=draft_model)
    config = RunnerConfig(models[0], block_size=BLOCK, dtype="float32", max_num_seqs=40, max_loras=NUM_ADAPTERS)
    config = with_room_for_proposer(settings, config)
    runner = _runner(models, max_draft_tokens=config.max_draft_tokens)
    proposer = build_proposer(settings, config, runner)
    if isinstance(proposer, HiddenVectorProposer):
        proposer._least_chance = 1e-9  # random numbers draft nothing likely
    runner.verify_drafts_of(proposer)
    crowded = {"num_blocks": 40, "token_budget": 24, "arrivals_per_step": 1, "headroom_tokens": 1}
    outcome = run(runner, _sequences(), policy=FixedDepth(4), **crowded)
    assert outcome.num_preemptions > 0
    assert outcome.speculation is not None
    assert outcome.speculation.num_draft_tokens > 200
    if speculative == "draft":
        # It is the model itself, which drafts rightly where there is no adapter.
        assert outcome.speculation.num_accepted_tokens > 20
    _assert_greedy(outcome.tokens, models[1])


def test_grammars_bind_answers_of_adapters(models: tuple[Path, list[Any], list[Path]]) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=12, grammar=Grammar(kind="regex", source="[a-f]+;"))
    sequences = _sequences(sampling)
    for sequence in sequences:
        sequence.constraint = constraint_of(sampling)
    answers = run(_runner(models), sequences).tokens
    # Each model takes its own likeliest token among those that the grammar allows, as the oracle does.
    allowed = [CHARACTERS.index(letter) for letter in "abcdef"]
    for i in range(4):
        first = oracle_logits(models[1][i], torch.tensor(PROMPTS[0]))[-1]
        assert answers[str(i)][0] == allowed[int(first[allowed].argmax())]
        assert set(answers[str(i)]) <= {*allowed, CHARACTERS.index(";"), EOS}


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters(
    models: tuple[Path, list[Any], list[Path]],
) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=12, logprobs=4, prompt_logprobs=2)
    mixed = run(_runner(models), _sequences(sampling))
    plain = run(make_runner(models[0], max_model_len=96, dtype="float32"), _sequences_without_adapters(sampling))
    for i in range(0, 12, NUM_ADAPTERS + 1):
        assert mixed.logprobs[str(i)] == plain.logprobs[str(i)]
        assert mixed.prompt_logprobs[str(i)] == plain.prompt_logprobs[str(i)]


def _sequences_without_adapters(sampling: Sampling) -> list[Sequence]:
    sequences = _sequences(sampling)
    for sequence in sequences:
        sequence.adapter = None
    return sequences


@pytest.mark.parametrize("num_swaps", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_other_content_in_a_slot_serves_no_stale_prefix(
    models: tuple[Path, list[Any], list[Path]], num_swaps: int
) -> None:
    runner = _runner(models)
    targets = runner.model.adapters
    assert targets is not None
    adapters = [read_adapter(adapter, targets) for adapter in models[2]]
    packed = [targets.pack(adapter.low_ranks) for adapter in adapters]
    scheduler = Scheduler(
        SchedulerConfig(block_size=4, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=96)
    )
    engine, answers, expected = Engine(scheduler, runner), {}, {}
    for i in range(NUM_ADAPTERS + 1):
        # Alone in an engine of its own.
        slot, salt = (None, b"") if i == 0 else (i - 1, bytes([i]))
        sequence = Sequence("0", list(_SHARED), len(_SHARED), GREEDY, max_tokens=12, adapter=slot, salt=salt)
        expected[i] = run(runner, [sequence]).tokens["0"]
    for number in range(num_swaps):
        content = number % NUM_ADAPTERS
        # The same slot, as if the same name had been loaded again; requests without an adapter run on.
        targets.place(0, packed[content], adapters[content].max_rank)
        for name, slot, salt in (("base", None, b""), ("adapted", 0, bytes([content + 1]))):
            engine.add(
                Sequence(f"{name}{number}", list(_SHARED), len(_SHARED), GREEDY, max_tokens=12, adapter=slot, salt=salt)
            )
        while engine.has_work():
            for event in engine.step():
                answers.setdefault(event.sequence.id, []).extend(event.token_ids)
        assert answers.pop(f"base{number}") == expected[0]
        assert answers.pop(f"adapted{number}") == expected[content + 1]
    assert scheduler.stats.num_prefix_hits > num_swaps
    runner.clear()


NUM_TOKENS = 24
LOGPROBS = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=5)


def _recurrent_sequences(vocab_size: int, expected: Outcome | None = None) -> list[Sequence]:
    """Return sequences, every other one with the adapter; with `expected`, most of their next tokens are drafted."""
    found = []
    for number in range(6):
        prompt = [token_id % vocab_size for token_id in random_prompt(9 + 5 * number, seed=number)]
        sequence = Sequence(str(number), prompt, len(prompt), LOGPROBS, max_tokens=NUM_TOKENS)
        if number % 2:
            sequence.adapter, sequence.salt = 0, b"adapter"
        if expected is not None:
            coming = expected.tokens[sequence.id]
            sequence.prediction = tuple(
                (token_id + (n in (5, 11, 12, 18))) % vocab_size for n, token_id in enumerate(coming)
            )
        found.append(sequence)
    return found


@pytest.mark.parametrize("name", ["qwen3_5_moe", "bamba", "lfm2", "nemotron_h-experts"])
def test_drafts_and_preemptions_leave_the_bits_of_merged_weights(name: str, tmp_path: Path) -> None:
    oracle = save_case(name, tmp_path / "model", eos_token_id=None)
    vocab_size = oracle.config.vocab_size
    sizes = linear_sizes(oracle)
    sizes.pop("lm_head")
    adapter = write_adapter(tmp_path / "adapter", sizes, seed=6)

    def answer(expected: Outcome | None = None, **changes: int) -> Outcome:
        proposer = None if expected is None else NgramProposer(10_000)
        settings = {"max_model_len": 96, "dtype": "float32", "max_loras": 1, "max_draft_tokens": 4}
        runner = make_runner(tmp_path / "model", proposer=proposer, **settings)
        place(runner.model, 0, adapter)
        state = state_config(runner.num_state_slots, runner.block_size)
        how = {"arrivals_per_step": 2, "token_budget": 24, "headroom_tokens": 1, "state": state, **changes}
        policy = None if expected is None else FixedDepth(4)
        return run(runner, _recurrent_sequences(vocab_size, expected), policy=policy, **how)

    expected = answer()
    drafted, crowded = answer(expected), answer(expected, num_blocks=48)
    assert drafted.speculation is not None
    assert drafted.speculation.num_accepted_tokens > 20
    assert crowded.num_preemptions > 0
    assert expected.logprobs == drafted.logprobs == crowded.logprobs
    merged = copy.deepcopy(oracle)
    merge(merged, adapter)
    for sequence in _recurrent_sequences(vocab_size):
        tokens = torch.tensor([*sequence.token_ids, *expected.tokens[sequence.id]])
        model = oracle if sequence.adapter is None else merged
        scores = oracle_logits(model, tokens).log_softmax(-1)[sequence.num_prompt_tokens - 1 : -1]
        for entry, row in zip(expected.logprobs[sequence.id], scores, strict=True):
            assert all(abs(logprob - row[token_id].item()) < 1e-3 for token_id, logprob in entry.top)
