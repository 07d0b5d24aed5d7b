"""Guided sequences on the real engine: every output is a document, and the same one whatever goes on beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import DEVICES, load, make_device_runner
from tests.gpu_worker.execution.engine_run import VOCAB, Outcome, make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.structured_output import tiny_tokenizer
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, constraint_of, text_of, tokens_of

assert tiny_tokenizer.VOCAB == VOCAB

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "color": {"enum": ["red", "green", "ultramarine"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "color", "sizes"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(kind="json_schema", source=json.dumps(SCHEMA))

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"temperature": 1.0, "logit_bias": {EOS: 9.0, tokens_of("x")[0]: 30.0, tokens_of('"')[0]: 4.0}},
    "logprobs": {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1},
    "no end": {"temperature": 1.0, "ignore_eos": True},
    "least tokens": {"temperature": 1.0, "min_tokens": 90},
}


def guided(name: str, number: int = 0, emitted: Iterable[int] = (), length: int = 9, **more: Any) -> Sequence:
    options = {"max_tokens": 120, **SAMPLINGS[name], **more}
    sampling = Sampling(seed=number, grammar=GRAMMAR, **options)
    sequence = make_sequence(f"{name} {number}", random_prompt(length, number), sampling, tuple(emitted))
    sequence.eos_token_ids = frozenset({EOS})
    sequence.constraint = constraint_of(sampling, emitted)
    return sequence


def free(number: int) -> Sequence:
    sampling = Sampling(temperature=1.0, seed=number, max_tokens=30)
    return make_sequence(f"free {number}", random_prompt(5 + number, 50 + number), sampling)


def everybody() -> list[Sequence]:
    return [guided(name, number) for number, name in enumerate(SAMPLINGS)]


def check_document(token_ids: list[int]) -> None:
    """Assert that an output is a document of the schema. Strings are cut at their bound, so it is never endless."""
    document = json.loads(text_of(token_ids))
    assert list(document) == ["name", "color", "sizes"]
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 4
    assert document["color"] in ("red", "green", "ultramarine")
    assert len(document["sizes"]) <= 2
    assert all(isinstance(size, int) and 0 <= size <= 99 for size in document["sizes"])


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    """The answer of each sequence, alone and undisturbed."""
    runner = make_runner(directory)
    answers: dict[str, Any] = {}
    for sequence in [*everybody(), *map(free, range(4))]:
        outcome = run(runner, [sequence])
        answers[sequence.id] = outcome.tokens[sequence.id], outcome.logprobs[sequence.id]
    return answers


def test_forced_tokens_take_no_step_each(directory: Path, alone: dict[str, Any]) -> None:
    runner = make_runner(directory)
    for sequence in everybody():
        outcome = run(runner, [sequence])
        assert outcome.num_steps < 0.8 * len(outcome.tokens[sequence.id])
        assert sequence.num_drafted_tokens == 0, "they are not drafts of anybody's"


def check_outcome(outcome: Outcome, sequences: Iterable[Sequence], alone: dict[str, Any]) -> None:
    for sequence in sequences:
        num_emitted = len(alone[sequence.id][0]) - len(outcome.tokens.get(sequence.id, []))
        token_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        assert token_ids == alone[sequence.id][0], sequence.id
        logprobs = outcome.logprobs.get(sequence.id, [])
        assert [entry.token_id for entry in logprobs] == [
            entry.token_id for entry in alone[sequence.id][1][num_emitted:]
        ], sequence.id
        assert all(entry.logprob > -100 for entry in logprobs), "they are of the model's own distribution"


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_is_a_document_whatever_the_sampling(alone: dict[str, Any], name: str) -> None:
    number = list(SAMPLINGS).index(name)
    check_document(alone[f"{name} {number}"][0])


def test_output_ends_with_the_last_token_of_the_document(alone: dict[str, Any]) -> None:
    for name, (token_ids, _) in alone.items():
        if not name.startswith("free"):
            assert CHARACTERS[token_ids[-1]] == "}"


CHARACTERS = tiny_tokenizer.CHARACTERS


def test_output_goes_on_elsewhere_from_any_place(directory: Path, alone: dict[str, Any]) -> None:
    whole = alone["temperature 1"][0]
    runner = make_runner(directory)
    for count in range(len(whole) + 1):
        sequence = guided("temperature", 1, whole[:count])
        run(runner, [sequence])
        assert sequence.token_ids[sequence.num_prompt_tokens :] == whole, count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_graphed", [False, True])
def test_device_one_step_behind_has_the_same_outputs(
    directory: Path, alone: dict[str, Any], is_graphed: bool, device: str
) -> None:
    runner: TorchModelRunner = make_device_runner(load(directory, device), is_graphed=is_graphed)
    sequences = [*everybody(), *map(free, range(4))]
    outcome = run(runner, sequences, arrivals_per_step=3)
    if device == "cpu":
        check_outcome(outcome, sequences, alone)
    for sequence in everybody():
        check_document(outcome.tokens[sequence.id])


def test_sequence_whose_grammar_cannot_go_on_ends_alone(directory: Path, alone: dict[str, Any]) -> None:
    broken = guided("greedy", 0)
    whole, count = alone["greedy 0"][0], itertools.count()
    constraint = broken.constraint

    class FailsLate:
        error: str | None = None
        is_complete = False

        def advance(self, token_id: int) -> bool:
            return self.error is None and constraint.advance(token_id)

        def advance_inside(self, token_id: int) -> bool:
            return self.error is None and constraint.advance_inside(token_id)

        def fill_mask(self, drafts: tuple[int, ...], address: int) -> None:
            constraint.fill_mask(drafts, address)
            if next(count) == 5:
                self.error = "too hard"

        def forced_tokens(self) -> list[int]:
            return []

    broken.constraint = FailsLate()  # type: ignore[assignment]
    others = [guided("temperature", 1), free(2)]
    outcome = run(make_runner(directory), [broken, *others])
    assert outcome.errors == {broken.id: "too hard"}
    assert outcome.tokens[broken.id] == whole[:5]
    for sequence in others:
        assert sequence.token_ids[sequence.num_prompt_tokens :] == alone[sequence.id][0]
