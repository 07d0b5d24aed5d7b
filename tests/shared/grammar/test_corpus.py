"""What llguidance makes of the corpus: valid documents may be written, invalid ones never, refusals say why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from shared.grammar import Grammar, GrammarError, check_grammar, grammar_text
from tests.shared.grammar.byte_matcher import accepts


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """A line of corpus.jsonl: a schema and its documents.

    Attributes:
        valid: Documents that match, their members in the order of the schema's properties.
        invalid: Documents that do not.
        refused: The word that a refusal of the schema names; empty if the schema is supported.
    """

    schema: Any
    valid: list[Any]
    invalid: list[Any]
    refused: str = ""


CORPUS = msgspec.json.Decoder(Case).decode_lines(Path(__file__).with_name("corpus.jsonl").read_bytes())
LEAST_SUPPORTED = 0.88


def as_grammar(case: Case) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(case.schema), strict=True)


def written(document: Any) -> Iterator[str]:
    """Yield a document as models write it: on one line, with spaces, and indented."""
    yield json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(document, ensure_ascii=False)
    yield json.dumps(document, ensure_ascii=False, indent=2)


def problems(case: Case) -> list[str]:
    grammar = as_grammar(case)
    try:
        check_grammar(grammar)
    except GrammarError as error:
        is_named = bool(case.refused) and case.refused in error.reason
        return [] if is_named else [f"{case.schema}: {error}"]
    if case.refused:
        return [f"{case.schema}: not refused"]
    text = grammar_text(grammar)
    wrong = [f"{case.schema}: refused {each}" for d in case.valid for each in written(d) if not accepts(text, each)]
    return wrong + [f"{case.schema}: accepted {d}" for d in case.invalid if accepts(text, next(written(d)))]


def test_corpus_is_wide_and_mostly_supported() -> None:
    supported = sum(not case.refused for case in CORPUS)
    assert len({json.dumps(case.schema) for case in CORPUS}) >= 300
    assert supported / len(CORPUS) >= LEAST_SUPPORTED
    assert sum(len(case.invalid) for case in CORPUS) >= 500


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_valid_documents_are_accepted_and_invalid_ones_and_unsupported_schemas_refused(part: int) -> None:
    assert [problem for case in CORPUS[part::3] for problem in problems(case)] == []


@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_documents_are_labelled_as_another_validator_says() -> None:
    wrong = []
    num_unread = 0
    for case in CORPUS:
        kind = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
        validator = kind(case.schema, format_checker=kind.FORMAT_CHECKER)
        try:
            wrong += [f"{case.schema}: {each} is said to match" for each in case.valid if not validator.is_valid(each)]
            if "format" not in json.dumps(case.schema):
                wrong += [f"{case.schema}: {each} is said not to" for each in case.invalid if validator.is_valid(each)]
        except re.error:
            # It reads patterns as Python does.
            num_unread += 1
    assert wrong == []
    assert num_unread <= 5
