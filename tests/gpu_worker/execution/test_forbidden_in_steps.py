"""Tokens that requests forbid, in the steps of every form of the runner, behind drafts, and after a move."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.models.decoder import CausalLM
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import make_device_runner
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import VOCAB, make_sequence, random_prompt, run

FORMS: dict[str, dict[str, Any]] = {
    "synchronous": {"is_graphed": False, "is_asynchronous": False},
    "two-in-flight": {"is_graphed": False},
    "graphed": {"is_graphed": True},
}
PROPOSERS = {"chains": ChainProposer}
ENDS = frozenset({3, 50})
NUM_TOKENS = 24
# So few that runs of two come often.
ALLOWED = (3, 7, 11, 20, 33, 50, 64)
RUNS = ((7, 11), (20,), (33, 33), (64, 7, 7), (11, 64))
OPTIONS: list[dict[str, Any]] = [
    {"bad_words": ("x",), "allowed_token_ids": ALLOWED, "temperature": 1.5},
    {"min_tokens": 12, "allowed_token_ids": ALLOWED},
    {"bad_words": ("x",), "allowed_token_ids": ALLOWED, "min_tokens": 5, "presence_penalty": 0.5, "top_k": 5},
    {"temperature": 0.9},
    {"bad_words": ("x",), "logprobs": 2, "logit_bias": {7: 3.0, 11: 3.0}, "repetition_penalty": 1.1},
]


def sequences(output: dict[str, list[int]] | None = None) -> list[Sequence]:
    """Return new sequences, or ones that continue a part of these outputs."""
    made = []
    for index in range(3 * len(OPTIONS)):
        sampling = Sampling(**{"max_tokens": NUM_TOKENS, "seed": index, **OPTIONS[index % len(OPTIONS)]})
        emitted = () if output is None else tuple(output[str(index)][: min(index, len(output[str(index)]) - 1)])
        sequence = make_sequence(str(index), random_prompt(3 + index, seed=index), sampling, emitted)
        sequence.eos_token_ids = ENDS
        sequence.bad_words = RUNS if sampling.bad_words else ()
        made.append(sequence)
    return made


@pytest.fixture(scope="module")
def tokens(model: CausalLM) -> dict[str, list[int]]:
    return run(make_device_runner(model, is_graphed=False, is_asynchronous=False), sequences()).tokens


def test_outputs_have_nothing_that_was_forbidden(tokens: dict[str, list[int]]) -> None:
    for sequence in sequences():
        output, sampling = tokens[sequence.id], sequence.sampling
        assert set(output) <= set(sampling.allowed_token_ids or range(VOCAB))
        assert not ENDS & set(output[: sampling.min_tokens])
        for run_ in sequence.bad_words:
            places = range(len(output) - len(run_) + 1)
            assert all(tuple(output[place : place + len(run_)]) != run_ for place in places)
    assert sum(map(len, tokens.values())) > 150


@pytest.mark.parametrize("proposer", [None, *PROPOSERS])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_all_drafts_lead_to_the_same_tokens(
    model: CausalLM, tokens: dict[str, list[int]], form: str, proposer: str | None
) -> None:
    depth = 0 if proposer is None else 4
    runner = make_device_runner(model, max_draft_tokens=depth, **FORMS[form])
    policy = None
    if proposer is not None:
        runner.verify_drafts_of(PROPOSERS[proposer](tokens, 0.7))
        policy = FixedDepth(depth)
    outcome = run(runner, sequences(), policy=policy, token_budget=50, arrivals_per_step=3)
    assert outcome.tokens == tokens


def test_moved_sequences_continue_with_the_same_tokens(model: CausalLM, tokens: dict[str, list[int]]) -> None:
    resumed = sequences(tokens)
    num_emitted = {sequence.id: sequence.num_output_tokens for sequence in resumed}
    outcome = run(make_device_runner(model, is_graphed=False), resumed)
    assert outcome.tokens == {name: output[num_emitted[name] :] for name, output in tokens.items()}
