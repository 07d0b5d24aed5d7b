"""How drafts are verified: in how many steps and launches, what the proposer is shown, by which distribution.

That tokens are those without drafts, whatever is sampled: `tests.gpu_worker.matrix.test_speculation_matrix`.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.graphs import ComputedRows, StepGraphs
from gpu_worker.execution.drafts import drafting
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import make_device_runner
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer, WatchingProposer
from tests.gpu_worker.execution.engine_run import Outcome, make_sequence, random_prompt, run
from tests.gpu_worker.execution.sampling.sampler_run import SamplerRun, adjusted_logits, distribution

DEPTH = 6
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {3: 4.0}, "logprobs": 2},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.2, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1, "frequency_penalty": -0.3},
]
TRAFFIC: dict[str, dict[str, int]] = {
    "whole-batch": {"token_budget": 64},
    "chunks-amid-drafts": {"token_budget": 21, "max_num_seqs": 9, "arrivals_per_step": 1},
    "preemptions": {"num_blocks": 50, "headroom_tokens": 0, "token_budget": 200},
}
FORMS: dict[str, dict[str, bool]] = {
    "synchronous": {"is_graphed": False, "is_asynchronous": False},
    "eager": {"is_graphed": False},
    "graphed": {"is_graphed": True},
}


def sequences() -> list[Sequence]:
    """Some of them are several answers to one prompt."""
    shared = random_prompt(16, seed=99)
    return [
        make_sequence(
            str(index),
            [*shared[: index % 3 * 8], *random_prompt(2 + index // 2 * 2, seed=index // 2)],
            Sampling(max_tokens=24, seed=index, **OPTIONS[index % len(OPTIONS)]),
        )
        for index in range(2 * len(OPTIONS))
    ]


@pytest.fixture(scope="module")
def plain(model: CausalLM) -> Outcome:
    return run(make_device_runner(model, is_graphed=False), sequences())


def make_verifier(model: CausalLM, proposer: Proposer, *, is_graphed: bool, **settings: Any) -> TorchModelRunner:
    runner = make_device_runner(model, is_graphed=is_graphed, max_draft_tokens=DEPTH, **settings)
    runner.verify_drafts_of(proposer)
    return runner


def num_accepted(outcome: Outcome) -> int:
    assert outcome.speculation is not None
    return outcome.speculation.num_accepted_tokens


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_right_drafts_save_steps_and_are_verified_in_graphs(model: CausalLM, plain: Outcome, is_graphed: bool) -> None:
    proposer = ChainProposer(plain.tokens, 1.0)
    proposer.random.randint = lambda low, high: high  # type: ignore[method-assign]
    runner = make_verifier(model, proposer, is_graphed=is_graphed)
    launches: list[int] = []
    launch = runner._launch
    runner._launch = lambda *args: (launches.append(1), launch(*args))[1]  # type: ignore[method-assign]
    outcome = run(runner, sequences(), policy=FixedDepth(5), token_budget=400)
    assert outcome.tokens == plain.tokens
    assert outcome.num_steps == 1 + 4
    assert len(launches) == (1 if is_graphed else 5)


@pytest.fixture
def reused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what graphs return become NaN when the next one runs, as a GPU's graphs overwrite it."""
    run_graph, latest = StepGraphs.run, list[torch.Tensor]()

    def run_over(self: StepGraphs, *arguments: Any) -> ComputedRows:
        for tensor in latest:
            tensor.fill_(float("nan"))
        computed = run_graph(self, *arguments)
        latest[:] = [tensor for tensor in (computed.hidden, computed.logits) if tensor is not None]
        return computed

    monkeypatch.setattr(StepGraphs, "run", torch.inference_mode()(run_over))


@pytest.mark.usefixtures("reused_memory")
@pytest.mark.parametrize("traffic", ["whole-batch", "chunks-amid-drafts", "preemptions"])
@pytest.mark.parametrize("form", FORMS)
def test_proposer_is_shown_what_transformers_makes_of_the_tokens(
    model: CausalLM, tiny: tuple[Path, Any], plain: Outcome, traffic: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps without drafts are shown before the next one, too.
    monkeypatch.setattr(drafting, "MAX_KEPT_TOKENS", 0)
    watching = WatchingProposer(plain.tokens, 0.8)
    run(make_verifier(model, watching, **FORMS[form]), sequences(), policy=FixedDepth(DEPTH), **TRAFFIC[traffic])
    for sequence in sequences():
        seen = watching.seen[sequence.id]
        # What a prefix hit brought was never computed; the last token never is. Nobody asks behind the last step.
        known = [*sequence.token_ids, *plain.tokens[sequence.id]]
        assert len(known) - 3 - DEPTH <= max(seen) <= len(known) - 2
        assert len(seen) >= len(plain.tokens[sequence.id]) - 1 - DEPTH
        with torch.no_grad():
            expected = tiny[1].model(torch.tensor([known])).last_hidden_state[0]
        for position, (token_id, hidden) in seen.items():
            assert token_id == known[position]
            torch.testing.assert_close(hidden.cpu(), expected[position], atol=2e-4, rtol=2e-4)


def test_proposer_that_raises_is_left_out(model: CausalLM, plain: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    proposer = ChainProposer({}, 1.0)
    outcome = run(make_verifier(model, proposer, is_graphed=True), sequences(), policy=FixedDepth(4))
    assert outcome.tokens == plain.tokens
    assert caplog.text.count("the proposer of drafts failed") == 1


def test_rows_of_logits_are_made_a_bounded_number_at_a_time(
    model: CausalLM, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.execution.step.MAX_VERIFIED_ROWS", 1)
    runner = make_verifier(model, ChainProposer(plain.tokens, 0.9), is_graphed=False, max_num_seqs=20)
    sizes: list[int] = []
    logits = model.logits

    def counted(hidden: torch.Tensor, *adapters: Any) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden, *adapters)

    monkeypatch.setattr(model, "logits", counted)
    chosen = [sequence for sequence in sequences() if sequence.sampling.prompt_logprobs is None]
    outcome = run(runner, chosen, policy=FixedDepth(DEPTH), token_budget=400)
    assert outcome.tokens == {sequence.id: plain.tokens[sequence.id] for sequence in chosen}
    assert max(sizes) == 20
    assert num_accepted(outcome) > 50


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_warm_up_with_drafts_leaves_generation_unchanged(model: CausalLM, plain: Outcome, is_graphed: bool) -> None:
    runner = make_device_runner(model, is_graphed=False, max_draft_tokens=DEPTH)
    runner.warm_up()
    assert runner.max_steps_in_flight == 2
    if is_graphed:
        runner.capture_graphs()
    runner.verify_drafts_of(ChainProposer(plain.tokens, 0.8))
    assert run(runner, sequences(), policy=FixedDepth(DEPTH), token_budget=200).tokens == plain.tokens


VOCAB = 8
LENGTH = 3
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
BATCH = 512

# The next token's logits, by the token before.
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 0.8


def exact() -> dict[tuple[int, ...], float]:
    """The probability of every answer to a prompt of token 0, by the formula."""
    rules = Sampling(**SAMPLING)
    rows = [distribution(adjusted_logits(TABLE[token].tolist(), rules, [], []), rules) for token in range(VOCAB)]
    return {
        answer: math.prod(rows[before][after] for before, after in itertools.pairwise((0, *answer)))
        for answer in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def answers(num_samples: int, num_drafts: int) -> tuple[dict[tuple[int, ...], int], float]:
    """Generate with drafts that anybody could have made up; return how often each answer came, and the acceptance."""
    generator = random.Random(1)
    counts: dict[tuple[int, ...], int] = {}
    num_drafted = num_accepted = 0
    for first in range(0, num_samples, BATCH):
        open_ones = [
            Sequence(str(seed), [0], 1, Sampling(**SAMPLING, seed=seed), LENGTH) for seed in range(first, first + BATCH)
        ]
        sampler = SamplerRun(VOCAB)
        while open_ones:
            drafts = [Draft(tuple(generator.choices(range(VOCAB), k=num_drafts))) for _ in open_ones]
            before = [t for s, d in zip(open_ones, drafts, strict=True) for t in (s.token_ids[-1], *d.token_ids)]
            results = sampler.verify(TABLE[before], open_ones, drafts)
            for sequence, sampled in zip(open_ones, results, strict=True):
                sequence.token_ids += sampled.token_ids
                num_drafted += sampled.num_drafted
                num_accepted += sampled.num_accepted
                if len(sequence.token_ids) > LENGTH:
                    answer = tuple(sequence.token_ids[1 : LENGTH + 1])
                    counts[answer] = counts.get(answer, 0) + 1
            open_ones = [sequence for sequence in open_ones if len(sequence.token_ids) <= LENGTH]
    return counts, num_accepted / num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_answers_with_drafts_follow_the_exact_distribution(num_drafts: int) -> None:
    num_samples = 100 * BATCH
    counts, acceptance = answers(num_samples, num_drafts)
    expected = {answer: probability * num_samples for answer, probability in exact().items()}
    assert sum(counts.values()) == num_samples > 50_000
    assert 0.03 < acceptance < 0.95
    assert {answer for answer, _ in counts.items() if expected[answer] == 0} == set()
    common = [answer for answer, count in expected.items() if count >= 5]
    statistic = sum((counts.get(answer, 0) - expected[answer]) ** 2 / expected[answer] for answer in common)
    rest = num_samples - sum(expected[answer] for answer in common)
    if rest >= 5:
        statistic += (num_samples - sum(counts.get(answer, 0) for answer in common) - rest) ** 2 / rest
    degrees = len(common) - (rest < 5)
    assert degrees > 30
    # Exceeded with probability 0.001 (Wilson-Hilferty).
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
