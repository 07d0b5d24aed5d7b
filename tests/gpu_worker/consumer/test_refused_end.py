from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.consumer.answer import refused_end
from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.step import SequenceEvent
from shared.grammar import GRAMMAR_PARAM, Grammar
from shared.sampling import Sampling
from tests.gpu_worker.consumer.test_answer_writer import held_request

GRAMMAR = Grammar(kind="regex", source="a+")
NO_TOKEN = str(InvalidLogitsError())


def end_of(sampling: Sampling, error: str) -> tuple[str | None, str] | None:
    _, sequence = held_request(Sampling(), [], echo=False)
    refused = refused_end(SequenceEvent(sequence, (), 0, "failed", error=error), sampling)
    return None if refused is None else (refused.param, str(refused))


@pytest.mark.parametrize(
    ("sampling", "param", "others"),
    [
        (Sampling(allowed_token_ids=(5,), grammar=GRAMMAR), "allowed_token_ids", "the grammar of the answer"),
        (Sampling(allowed_token_ids=(5,), bad_words=("a b",)), "allowed_token_ids", "bad_words"),
        (Sampling(bad_words=("a",), grammar=GRAMMAR), "bad_words", "the grammar of the answer"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "InvalidLogitsError: "])
def test_parameters_that_leave_no_token_together_are_the_clients_fault(
    sampling: Sampling, param: str, others: str, prefix: str
) -> None:
    message = f"{param}: together with {others} it leaves no token here. Loosen one of them."
    assert end_of(sampling, prefix + NO_TOKEN) == (param, message)


@pytest.mark.parametrize(("error", "param"), [("it takes too long", GRAMMAR_PARAM), ("the device is gone", None)])
def test_only_what_the_grammar_fails_for_is_told_as_its_fault(error: str, param: str | None) -> None:
    _, sequence = held_request(Sampling(), [], echo=False)
    constraint: Any = SimpleNamespace(is_at_fault=True, error="it takes too long")
    sequence.constraint = constraint
    refused = refused_end(SequenceEvent(sequence, (), 0, "failed", error=error), Sampling(grammar=GRAMMAR))
    assert (None if refused is None else refused.param) == param


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        (Sampling(), NO_TOKEN),
        (Sampling(grammar=GRAMMAR), NO_TOKEN),
        (Sampling(allowed_token_ids=(5,), grammar=GRAMMAR), "the device is gone"),
    ],
)
def test_other_failures_are_the_workers(sampling: Sampling, error: str) -> None:
    assert end_of(sampling, error) is None
