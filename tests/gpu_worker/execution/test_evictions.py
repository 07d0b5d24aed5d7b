"""Sequences whose budget of KV cache is smaller than they are: what they see, and what it depends on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.block_budget import BlockBudget, block_budget
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from ops.bench.spec.fixed_depth import FixedDepth
from shared.kv_budget import KvBudget
from shared.sampling import Sampling
from tests.gpu_worker.core.sequences import kept_tokens, limit
from tests.gpu_worker.execution.device_runs import load, make_device_runner
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import (
    BLOCK,
    MAX_LEN,
    make_runner,
    make_sequence,
    mixed_sequences,
    random_prompt,
    run,
)

BUDGET = block_budget(KvBudget(40), BLOCK, 40)
DENSE = (40, BLOCK, BUDGET.num_evicted * BLOCK)
GREEDY = Sampling(temperature=0.0, max_tokens=90)
SEEDED = Sampling(temperature=1.0, seed=7, max_tokens=90, presence_penalty=0.3)


class DenseLlama:
    """Computes with the weights of a model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config
        self._head_dim = model.config.hidden_size // model.config.num_attention_heads

    def logits(self, token_ids: list[int], *budget: Any) -> torch.Tensor:
        """Return the logits behind each token; the budget is as `kept_tokens` takes it."""
        return torch.stack(list(self.each_logits(token_ids, *budget)))

    @torch.no_grad()
    def each_logits(self, token_ids: list[int], *budget: Any) -> Iterator[torch.Tensor]:
        """Yield the logits behind each token; whoever reads them may add decisions for the tokens to come.

        `attention` has for each token what each head of each layer attends to, of the tokens that it sees.
        """
        layers = self._model.model.layers
        keys: list[list[torch.Tensor]] = [[] for _ in layers]
        values: list[list[torch.Tensor]] = [[] for _ in layers]
        self.attention: list[list[torch.Tensor]] = []
        for place, token_id in enumerate(token_ids):
            kept = kept_tokens(place, *budget)
            x = self._model.model.embed_tokens.weight[token_id]
            self.attention.append([])
            for layer, own_keys, own_values in zip(layers, keys, values, strict=True):
                x = x + self._attend(layer, layer.input_layernorm(x), own_keys, own_values, kept)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            yield self._model.lm_head(self._model.model.norm(x))

    def shortfall(self, token_ids: list[int], start: int, *budget: Any) -> float:
        """Return by how much the logit of any token from `start` on is below the largest one."""
        logits, tokens = self.logits(token_ids[:-1], *budget)[start - 1 :], token_ids[start:]
        return float((logits.max(-1).values - logits[torch.arange(len(tokens)), tokens]).max())

    def _attend(
        self, layer: Any, x: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], kept: list[int]
    ) -> torch.Tensor:
        attention, dim = layer.self_attn, self._head_dim
        keys.append(attention.k_proj(x).view(-1, dim))
        values.append(attention.v_proj(x).view(-1, dim))
        places = torch.arange(len(kept))
        key = self._rotated(torch.stack([keys[token] for token in kept]), places)
        query = self._rotated(attention.q_proj(x).view(1, -1, dim), places[-1:])[0]
        value = torch.stack([values[token] for token in kept])
        growth = len(query) // key.shape[1]
        scores = torch.einsum("hd,thd->ht", query, key.repeat_interleave(growth, 1)) * dim**-0.5
        self.attention[-1].append(scores.softmax(-1))
        attended = torch.einsum("ht,thd->hd", scores.softmax(-1), value.repeat_interleave(growth, 1))
        output: torch.Tensor = attention.o_proj(attended.flatten())
        return output

    def _rotated(self, heads: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        parameters = self._config.rope_parameters
        exponents = torch.arange(0, self._head_dim, 2).float() / self._head_dim
        angles = places.float()[:, None, None] * parameters["rope_theta"] ** -exponents
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def budgeted(
    name: str,
    prompt: list[int],
    sampling: Sampling = GREEDY,
    emitted: tuple[int, ...] = (),
    budget: BlockBudget = BUDGET,
) -> Sequence:
    return limit(make_sequence(name, prompt, sampling, emitted), budget)


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchModelRunner:
    return make_runner(directory)


@pytest.fixture(scope="module")
def dense(tiny: tuple[Path, Any]) -> DenseLlama:
    return DenseLlama(tiny[1])


def logprobs_of(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    return logits[:-1].log_softmax(-1)[torch.arange(len(token_ids) - 1), token_ids[1:]]


def all_logprobs(runner: TorchModelRunner, sequence: Sequence, **settings: Any) -> list[float]:
    """Return the log probability of each token of a prompt but the first."""
    sequence.sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    sequence.max_tokens = 1
    outcome = run(runner, [sequence], **settings)
    return [entry.logprob for entry in outcome.prompt_logprobs["a"]]


def test_tokens_see_what_a_dense_model_sees_that_keeps_the_same_ones(
    runner: TorchModelRunner, dense: DenseLlama
) -> None:
    token_ids = random_prompt(150, seed=1)
    expected = logprobs_of(dense.logits(token_ids, *DENSE), token_ids)
    found = torch.tensor(all_logprobs(runner, budgeted("a", token_ids)))
    assert (found - expected).abs().max() < 1e-4
    # Without evictions they are others, from the first token on that misses one.
    whole = logprobs_of(dense.logits(token_ids, 1000, 4, 4), token_ids)
    assert (whole - expected)[:40].abs().max() < 1e-5
    assert (whole - expected)[41:].abs().max() > 0.1


def test_the_output_of_a_budget_is_that_of_the_dense_model(runner: TorchModelRunner, dense: DenseLlama) -> None:
    prompt = random_prompt(30, seed=2)
    tokens = run(runner, [budgeted("a", prompt)]).tokens["a"]
    assert len(tokens) == 90
    assert dense.shortfall([*prompt, *tokens], 30, *DENSE) < 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "traffic",
    [
        {"token_budget": 9, "max_num_seqs": 7, "arrivals_per_step": 1},
        {"num_blocks": 42, "headroom_tokens": 0},
        {"enable_prefix_caching": False},
    ],
    ids=["chunks-amid-decodes", "preemptions", "no-prefix-cache"],
)
def test_what_is_computed_beside_a_sequence_does_not_change_its_tokens(
    runner: TorchModelRunner, traffic: dict[str, Any], sampling: Sampling
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 39, 40, 41, 70)]
    alone = [run(runner, [budgeted("a", prompt, sampling)]).tokens["a"] for prompt in prompts]
    sequences = [budgeted(str(place), prompt, sampling) for place, prompt in enumerate(prompts)]
    sequences.insert(2, make_sequence("whole", prompts[4], sampling))
    outcome = run(runner, sequences, **traffic)
    assert [outcome.tokens[str(place)] for place in range(len(prompts))] == alone
    assert outcome.tokens["whole"] == run(runner, [make_sequence("whole", prompts[4], sampling)]).tokens["whole"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_emitted", [1, 10, 11, 33, 66, 89])
def test_another_worker_goes_on_with_the_same_tokens(
    directory: Path, runner: TorchModelRunner, sampling: Sampling, num_emitted: int
) -> None:
    prompt = random_prompt(30, seed=3)
    tokens = run(runner, [budgeted("a", prompt, sampling)]).tokens["a"]
    other = make_runner(directory)
    resumed = budgeted("a", prompt, sampling, tuple(tokens[:num_emitted]))
    assert run(other, [resumed], token_budget=13, max_num_seqs=4).tokens["a"] == tokens[num_emitted:]


def test_a_prefix_that_others_hold_stays_as_it_is(runner: TorchModelRunner) -> None:
    prompt = random_prompt(38, seed=4)
    expected = run(runner, [make_sequence("whole", [*prompt, 1], GREEDY)]).tokens["whole"]
    alone = run(runner, [budgeted("a", [*prompt, 2])]).tokens["a"]
    sequences = [
        make_sequence("whole", [*prompt, 1], GREEDY),
        budgeted("a", [*prompt, 2]),
        budgeted("b", [*prompt, 2]),
        make_sequence("late", [*prompt, 1], GREEDY),
    ]
    outcome = run(runner, sequences, arrivals_per_step=1)
    assert outcome.num_prefix_hits > 0
    assert outcome.tokens["whole"] == outcome.tokens["late"] == expected
    assert outcome.tokens["a"] == outcome.tokens["b"] == alone


def test_a_sequence_is_longer_than_the_context(runner: TorchModelRunner, dense: DenseLlama) -> None:
    prompt = random_prompt(20, seed=5)
    sampling = Sampling(temperature=0.0, max_tokens=4 * MAX_LEN)
    # A fourth of the blocks that one sequence of the context's length takes.
    outcome = run(runner, [budgeted("a", prompt, sampling)], num_blocks=MAX_LEN // BLOCK // 4)
    tokens = outcome.tokens["a"]
    assert len(tokens) == 4 * MAX_LEN
    assert outcome.num_preemptions == 0
    assert dense.shortfall([*prompt, *tokens[:200]], 20, *DENSE) < 1e-3


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_of_fewer_bits_turn_too(directory: Path, dense: DenseLlama, kv_dtype: str) -> None:
    narrow = make_runner(directory, kv_cache_dtype=kv_dtype)
    token_ids = random_prompt(150, seed=6)
    expected = logprobs_of(dense.logits(token_ids, *DENSE), token_ids)
    errors = (torch.tensor(all_logprobs(narrow, budgeted("a", token_ids))) - expected).abs()
    # As large behind evictions as before the first one.
    assert errors[40:].mean() < 2.5 * errors[:40].mean()


def test_a_budget_that_is_never_filled_changes_nothing(runner: TorchModelRunner) -> None:
    prompt, sampling = random_prompt(30, seed=8), Sampling(temperature=0.0, max_tokens=11)
    with_budget = run(runner, [budgeted("a", prompt, sampling)]).tokens["a"]
    assert with_budget == run(runner, [make_sequence("a", prompt, sampling)]).tokens["a"]


def test_grammars_drafts_and_preemptions_do_not_change_what_is_seen(directory: Path, runner: TorchModelRunner) -> None:
    def sequences() -> list[Sequence]:
        small = BlockBudget(4, 1, 1, BLOCK)
        # The others outgrow the pool.
        return [limit(each, small) if place % 2 else each for place, each in enumerate(mixed_sequences(14))]

    alone = {sequence.id: run(runner, [sequence]).tokens[sequence.id] for sequence in sequences()}
    drafting = make_runner(directory, proposer=ChainProposer(alone, 0.6))
    outcome = run(drafting, sequences(), policy=FixedDepth(4), num_blocks=24, headroom_tokens=0)
    assert outcome.num_preemptions > 0
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens > 0
    assert outcome.tokens == alone


# Two blocks leave at once, of which not all tokens are scored.
HEAVY, LASTING = (BlockBudget(12, 1, 2, BLOCK, policy, 6) for policy in ("heavy_hitters", "persistence"))
SCORED = (48, BLOCK, 2 * BLOCK)


def dense_decisions(dense: DenseLlama, token_ids: list[int], policy: str) -> list[tuple[int, ...]]:
    """Return what leaves by the attention in the dense model, of the last block before each eviction."""
    decisions: list[tuple[int, ...]] = []
    past = torch.zeros(12)
    computed = dense.each_logits(token_ids, *SCORED, decisions)
    for end in range(48, len(token_ids), 8):
        deque(itertools.islice(computed, 8 if decisions else end), maxlen=0)
        blocks = torch.zeros(12)
        for probabilities in itertools.chain.from_iterable(dense.attention[-4:]):
            padded = torch.nn.functional.pad(probabilities, (0, 48 - probabilities.shape[1]))
            blocks += padded.view(-1, 12, 4).sum(-1).amax(0)
        past = blocks if policy == "heavy_hitters" else past + (blocks > blocks.mean()).float()
        order = past[1:6].argsort(stable=True)[:2] + 1
        decisions.append(tuple(order.sort().values.tolist()))
        kept = torch.ones(12, dtype=torch.bool)
        kept[order] = False
        past = torch.cat((past[kept], torch.zeros(2)))
    return decisions


@pytest.mark.parametrize("budget", [HEAVY, LASTING], ids=["heavy_hitters", "persistence"])
@pytest.mark.parametrize("form", ["fused", "layered"])
def test_what_leaves_by_attention_is_what_a_dense_model_attends_to_least(
    directory: Path, dense: DenseLlama, budget: BlockBudget, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "layered":
        monkeypatch.setattr("gpu_worker.models.decoder._fusing_library", lambda *_: None)
    token_ids = random_prompt(100, seed=11)
    read = budgeted("a", token_ids, budget=budget)
    found = torch.tensor(all_logprobs(make_runner(directory), read, token_budget=7, max_num_seqs=2))
    assert read.scores is not None
    decisions = read.scores.decisions
    assert decisions == dense_decisions(dense, token_ids, budget.policy)
    assert len(set(decisions)) > 2, "always the same blocks: nothing was chosen"
    expected = logprobs_of(dense.logits(token_ids, *SCORED, decisions), token_ids)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("way", ["alone", "drafts", "traffic", "steps-ahead", "int8"])
def test_who_is_asked_does_not_depend_on_how_steps_are_made(directory: Path, dense: DenseLlama, way: str) -> None:
    """Drafts are right or wrong in turn; rejected ones are not asked."""
    prompt, drafts = random_prompt(30, seed=12), way == "drafts"
    runner = make_runner(directory, kv_cache_dtype="int8" if way == "int8" else "auto")
    if way == "steps-ahead":
        runner = make_device_runner(load(directory, "cpu"), is_graphed=True)
    if drafts:
        plain = run(runner, [budgeted("a", prompt, Sampling(temperature=0.0, max_tokens=70), budget=HEAVY)])
        runner.verify_drafts_of(ChainProposer(plain.tokens, 0.6))
    sequences = [budgeted("a", prompt, Sampling(temperature=0.0, max_tokens=70), budget=HEAVY)]
    settings: dict[str, Any] = {"policy": FixedDepth(3)} if drafts else {}
    if way == "traffic":
        sequences += [budgeted(str(n), random_prompt(40 + n, n), SEEDED, budget=LASTING) for n in range(4)]
        settings = {"token_budget": 9, "max_num_seqs": 5, "num_blocks": 42, "headroom_tokens": 0}
    outcome = run(runner, sequences, **settings)
    tokens = [*prompt, *outcome.tokens["a"]]
    assert len(tokens) == 100
    if drafts:
        assert 0 < sequences[0].num_accepted_tokens < sequences[0].num_drafted_tokens
    assert sequences[0].scores is not None
    decisions = sequences[0].scores.decisions
    if way != "int8":
        assert decisions == dense_decisions(dense, tokens[:-1], "heavy_hitters")
    assert dense.shortfall(tokens, 30, *SCORED, decisions) < (1.0 if way == "int8" else 1e-4)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_another_attempt_repeats_what_was_evicted_before(
    runner: TorchModelRunner, dense: DenseLlama, is_preempted: bool
) -> None:
    """The recorded decisions are others than those of its own numbers, which come only behind them."""
    prompt, emitted = random_prompt(40, seed=13), random_prompt(50, seed=14)
    recorded = [(1, 5), (2, 3), (4, 5), (1, 2)]
    assert dense_decisions(dense, [*prompt, *emitted], "heavy_hitters")[:4] != recorded
    resumed = limit(make_sequence("a", prompt, GREEDY, tuple(emitted)), HEAVY, recorded)
    others = [make_sequence(str(n), random_prompt(40, seed=n), SEEDED) for n in range(4)] if is_preempted else []
    settings: dict[str, Any] = {"num_blocks": 42, "headroom_tokens": 0} if is_preempted else {}
    outcome = run(runner, [*others, resumed], **settings)
    assert bool(resumed.num_preemptions) == is_preempted
    assert resumed.scores is not None
    assert resumed.scores.decisions[:4] == recorded
    assert len(resumed.scores.decisions) == 11
    tokens = [*prompt, *emitted, *outcome.tokens["a"]]
    assert dense.shortfall(tokens, 90, *SCORED, resumed.scores.decisions) < 1e-4
