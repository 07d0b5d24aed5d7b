"""What is admitted compiles on the worker, and what its grammar lets a model write matches the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.structured_output.compiled_grammar import compile_grammar
from shared.grammar import Grammar, GrammarError, check_grammar, grammar_text
from tests.gpu_worker.structured_output.tiny_tokenizer import tiny_tokenizer
from tests.shared.grammar.schemas import schemas, written_document


def compiles_and_matches(schema: Any, seed: int) -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps(schema), strict=True)
    try:
        check_grammar(grammar)
    except GrammarError:
        return
    compile_grammar(grammar, tiny_tokenizer())
    text = written_document(grammar_text(grammar), random.Random(seed))
    if text is not None:
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid(json.loads(text)), text


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_admitted_schema_compiles_and_its_documents_match(schema: Any, seed: int) -> None:
    compiles_and_matches(schema, seed)


@pytest.mark.slow
@settings(max_examples=4_000, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_many_admitted_schemas_compile_and_their_documents_match(schema: Any, seed: int) -> None:
    compiles_and_matches(schema, seed)
