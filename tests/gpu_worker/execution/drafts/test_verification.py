"""Drafts of any quality leave tokens as they are without: greedy or drawn, whatever the sampling parameters."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Values
from pathlib import Path

import pytest

from gpu_worker.core.draft import ROOT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.speculative.draft_model.proposer import DraftModelProposer
from gpu_worker.speculative.ngram.proposer import NgramProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, make_runner, make_sequence, random_prompt, run, save_tiny_model


class KnowingProposer:
    """Knows how sequences go on, and tells it with a set probability for each token; else tells anything."""

    wants_hidden = False

    def __init__(self, share_right: float = 0.8) -> None:
        self.share_right = share_right
        self.right: dict[str, list[int]] = {}
        self.random = random.Random(3)
        self.forgotten: list[str] = []

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        return [Draft(self._draft(request.sequence, request.num_tokens)) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        raise AssertionError("it does not want to know")

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.id)

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        right = self.right[sequence.id][sequence.num_output_tokens :][: self.random.randint(0, count)]
        wrong = [0, VOCAB - 1, VOCAB, -1, 10**9]
        return tuple(t if self.random.random() < self.share_right else self.random.choice(wrong) for t in right)


class BranchingProposer(KnowingProposer):
    """Hides how sequences go on among other ways."""

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        return [self._tree(request.sequence, request.num_tokens) for request in requests]

    def _tree(self, sequence: Sequence, count: int) -> Draft:
        right = self.right[sequence.id][sequence.num_output_tokens :]
        token_ids: list[int] = []
        parents: list[int] = []
        way = [ROOT]
        for guess in range(count):
            is_right = len(way) <= len(right) and self.random.random() < 0.5
            parent = way[-1] if is_right else self.random.randrange(ROOT, guess)
            # A wrong guess may be a right one by chance; the first of two equal ones is the one that is taken.
            token_ids.append(right[len(way) - 1] if is_right else self.random.randrange(VOCAB))
            parents.append(parent)
            if is_right:
                way.append(guess)
        return Draft(tuple(token_ids), tuple(parents))


SAMPLINGS = [
    Sampling(max_tokens=24, seed=seed, **options)  # type: ignore[arg-type]
    for seed, options in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            {"temperature": 0.0, "logit_bias": {3: 4.0}},
            {"temperature": 0.9},
            {"temperature": 0.9, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 20},
            {"temperature": 0.9, "min_p": 0.02},
            {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2},
            {"temperature": 1.2, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
            {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1},
        ]
        * 2
    )
]


def sequences() -> list[Sequence]:
    shared = random_prompt(16, seed=99)
    return [
        make_sequence(str(index), [*shared[: index % 3 * 8], *random_prompt(2 + index, seed=index)], sampling)
        for index, sampling in enumerate(SAMPLINGS)
    ]


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[str, list[int]]:
    runner, tokens = make_runner(directory), {}
    for sequence in sequences():
        tokens |= run(runner, [sequence]).tokens
    return tokens


@pytest.fixture(scope="module")
def proposer(plain: dict[str, list[int]]) -> KnowingProposer:
    proposer = KnowingProposer()
    proposer.right |= plain
    return proposer


@pytest.fixture(scope="module")
def runner(directory: Path, proposer: KnowingProposer) -> TorchModelRunner:
    return make_runner(directory, proposer=proposer)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_tokens_equal_those_without_drafts(runner: TorchModelRunner, plain: dict[str, list[int]], depth: int) -> None:
    outcome = run(runner, sequences(), policy=FixedDepth(depth), token_budget=200)
    assert outcome.tokens == plain
    assert outcome.speculation is not None
    assert 50 < outcome.speculation.num_accepted_tokens < outcome.speculation.num_draft_tokens


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("depth", [2, 9])
def test_tokens_equal_those_without_trees(
    directory: Path, plain: dict[str, list[int]], depth: int, kv_cache_dtype: str
) -> None:
    if kv_cache_dtype != "auto":
        runner = make_runner(directory, kv_cache_dtype=kv_cache_dtype)
        plain = {k: v for s in sequences() for k, v in run(runner, [s]).tokens.items()}
    proposer = BranchingProposer()
    proposer.right |= plain
    runner = make_runner(directory, proposer=proposer, kv_cache_dtype=kv_cache_dtype)
    outcome = run(runner, sequences(), policy=FixedDepth(depth), token_budget=300, arrivals_per_step=3)
    assert outcome.tokens == plain
    assert outcome.speculation is not None
    assert 50 < outcome.speculation.num_accepted_tokens < 0.6 * outcome.speculation.num_draft_tokens


def test_right_drafts_save_steps(directory: Path, plain: dict[str, list[int]]) -> None:
    knowing = KnowingProposer(1.0)
    knowing.right |= plain
    knowing.random.randint = lambda low, high: high  # type: ignore[method-assign]
    runner = make_runner(directory, proposer=knowing)
    outcome = run(runner, sequences(), policy=FixedDepth(5), token_budget=400)
    assert outcome.tokens == plain
    assert outcome.num_steps == 1 + 4
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens == outcome.speculation.num_draft_tokens


def test_drafts_amid_prompts_in_chunks_leave_tokens_unchanged(
    runner: TorchModelRunner, plain: dict[str, list[int]]
) -> None:
    outcome = run(runner, sequences(), policy=FixedDepth(4), token_budget=21, max_num_seqs=9, arrivals_per_step=1)
    assert outcome.tokens == plain
    assert outcome.num_prefix_hits > 20


def test_preempted_sequences_with_drafts_leave_tokens_unchanged(
    runner: TorchModelRunner, proposer: KnowingProposer, plain: dict[str, list[int]]
) -> None:
    proposer.forgotten.clear()
    outcome = run(runner, sequences(), policy=FixedDepth(4), num_blocks=50, headroom_tokens=0, token_budget=200)
    assert outcome.tokens == plain
    assert outcome.num_preemptions > 5
    assert len(proposer.forgotten) > outcome.num_preemptions


def test_sequences_resumed_elsewhere_continue_exactly(runner: TorchModelRunner, plain: dict[str, list[int]]) -> None:
    resumed = []
    for index, sequence in enumerate(sequences()):
        emitted = tuple(plain[sequence.id][: index % 23])
        resumed.append(make_sequence(sequence.id, sequence.token_ids, sequence.sampling, emitted))
    outcome = run(runner, resumed, policy=FixedDepth(3), token_budget=120)
    for index, sequence in enumerate(resumed):
        assert outcome.tokens[sequence.id] == plain[sequence.id][index % 23 :]


def test_logprobs_of_accepted_drafts_equal_those_without(directory: Path, runner: TorchModelRunner) -> None:
    asking = [sequence for sequence in sequences() if sequence.sampling.logprobs is not None]
    expected = run(make_runner(directory), asking)
    asking = [sequence for sequence in sequences() if sequence.sampling.logprobs is not None]
    outcome = run(runner, asking, policy=FixedDepth(6))
    for name, entries in expected.logprobs.items():
        assert len(entries) == 24
        for got, entry in zip(outcome.logprobs[name], entries, strict=True):
            assert (got.token_id, [i for i, _ in got.top]) == (entry.token_id, [i for i, _ in entry.top])
            assert got.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert outcome.prompt_logprobs[name] == expected.prompt_logprobs[name]


def test_stop_token_among_accepted_drafts_ends_the_sequence(
    runner: TorchModelRunner, plain: dict[str, list[int]]
) -> None:
    first = sequences()[3]
    stop = plain[first.id][9]
    sampling = Sampling(max_tokens=24, seed=3, temperature=0.9, stop_token_ids=(stop,))
    outcome = run(runner, [make_sequence(first.id, first.token_ids, sampling)], policy=FixedDepth(7))
    assert outcome.tokens[first.id] == plain[first.id][: plain[first.id].index(stop) + 1]


def test_ngram_drafts_leave_tokens_unchanged_and_are_accepted(directory: Path) -> None:
    repetitive = random_prompt(7, seed=5) * 5
    biased = Sampling(temperature=0.0, max_tokens=40, logit_bias=dict.fromkeys(repetitive[:3], 30.0))
    drawn = Sampling(temperature=0.8, max_tokens=40, seed=4, logit_bias=dict.fromkeys(repetitive[:3], 30.0))

    def fresh() -> list[Sequence]:
        return [make_sequence("greedy", repetitive, biased), make_sequence("drawn", repetitive, drawn)]

    expected = run(make_runner(directory), fresh())
    outcome = run(make_runner(directory, proposer=NgramProposer(10_000)), fresh(), policy=FixedDepth(4))
    assert outcome.tokens == expected.tokens
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens > 10
    assert outcome.num_steps < expected.num_steps


def test_proposer_that_raises_is_left_out(
    directory: Path, plain: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(KnowingProposer):
        def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
            raise RuntimeError("no more guesses")

    outcome = run(make_runner(directory, proposer=Broken()), sequences(), policy=FixedDepth(4))
    assert outcome.tokens == plain
    assert caplog.text.count("the proposer of drafts failed") == 1


def draft_model_proposer(runner: TorchModelRunner) -> DraftModelProposer:
    return DraftModelProposer(runner, vocab_size=VOCAB, max_model_len=runner.max_model_len, max_num_batched_tokens=64)


def test_drafts_of_the_same_model_are_right_also_where_tokens_are_drawn(
    directory: Path, plain: dict[str, list[int]]
) -> None:
    proposer = draft_model_proposer(make_runner(directory))
    outcome = run(make_runner(directory, proposer=proposer), sequences(), policy=FixedDepth(3), token_budget=200)
    assert outcome.tokens == plain
    assert outcome.speculation is not None
    # Those with penalties are guessed without them.
    assert outcome.speculation.num_accepted_tokens > 0.6 * outcome.speculation.num_draft_tokens
    unpenalised = [s for s in sequences() if s.sampling.repetition_penalty == 1.0 and not s.sampling.frequency_penalty]
    outcome = run(make_runner(directory, proposer=proposer), unpenalised, policy=FixedDepth(3), token_budget=200)
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens == outcome.speculation.num_draft_tokens > 150


def test_drafts_of_another_model_leave_tokens_unchanged(
    tmp_path: Path, directory: Path, plain: dict[str, list[int]]
) -> None:
    save_tiny_model(tmp_path, seed=6)
    proposer = draft_model_proposer(make_runner(tmp_path, num_blocks=60))
    outcome = run(
        make_runner(directory, proposer=proposer),
        sequences(),
        policy=FixedDepth(3),
        num_blocks=50,
        headroom_tokens=0,
        token_budget=90,
    )
    assert outcome.tokens == plain
    assert outcome.num_preemptions > 3
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens < 0.5 * outcome.speculation.num_draft_tokens
