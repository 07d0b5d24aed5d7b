"""Tokenizers of models: llguidance takes each token for the bytes that the worker sends for it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.structured_output import grammar_budget
from gpu_worker.structured_output.compiled_grammar import compile_grammar
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource, UnsupportedTokenizerError
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.token_table import build_table
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from shared.formats import Tool, ToolChoice, format_named
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.gguf.vocabularies import byte_pair_vocabulary, sentencepiece_vocabulary
from tests.gpu_worker.structured_output.tiny_tokenizer import (
    EOS,
    VOCAB,
    allowed,
    constraint_of,
    text_of,
    tiny_tokenizer,
    tokenizer_json,
    tokens_of,
)
from tests.gpu_worker.text.conftest import sentencepiece_tokenizer, wordpiece_tokenizer

PERSON = Grammar(
    kind="json_schema",
    source='{"type":"object","properties":{"name":{"type":"string","maxLength":4},"age":{"type":"integer"}},'
    '"required":["name","age"],"additionalProperties":false}',
)


def regex(source: str, **sampling: object) -> Sampling:
    return Sampling(grammar=Grammar(kind="regex", source=source), **sampling)  # type: ignore[arg-type]


def texts(token_ids: set[int]) -> set[str]:
    return {"<end>" if token_id == EOS else text_of([token_id]) for token_id in token_ids}


@pytest.mark.parametrize(
    ("output", "expected"), [("", set("ab")), ("a", set("1")), ("a1", {"1", "<end>"}), ("b", {"<end>"})]
)
def test_mask_allows_what_follows_and_the_end_where_the_grammar_accepts(output: str, expected: set[str]) -> None:
    constraint = constraint_of(regex("a1+|b"), tokens_of(output))
    assert texts(allowed(constraint)) == expected
    assert constraint.is_complete == (output == "b")


def test_constraint_made_anew_at_any_place_has_the_same_masks() -> None:
    sampling = Sampling(grammar=PERSON)
    output = tokens_of('{"name": "Bo",\n  "age": 42}')
    whole = constraint_of(sampling)
    for count, token_id in enumerate(output):
        mask = allowed(whole)
        assert token_id in mask
        assert allowed(constraint_of(sampling, output[:count])) == mask
        assert not whole.is_complete
        assert whole.advance(token_id)
    assert whole.is_complete
    assert constraint_of(sampling, output).is_complete


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from('{}" ,:nameagx10'), max_size=5), max_size=8), st.data())
def test_masks_behind_drafts_are_those_of_an_output_that_has_them(paths: list[list[str]], data: st.DataObject) -> None:
    sampling = Sampling(grammar=PERSON)
    document = tokens_of('{"name":"a","age":10}')
    count = data.draw(st.integers(0, len(document) - 1))
    constraint = constraint_of(sampling, document[:count])
    for path in paths:
        # Mostly something that may stand there.
        drafts = (*document[count : count + len(path)], *tokens_of("".join(path)))[: len(path) + 1]
        other = constraint_of(sampling, document[:count])
        follows = all(other.advance(token_id) for token_id in drafts)
        assert allowed(constraint, drafts) == (allowed(other) if follows else set(range(VOCAB)))
    assert constraint.error is None
    assert constraint.advance(document[count])
    assert allowed(constraint) == allowed(constraint_of(sampling, document[: count + 1]))


@pytest.mark.parametrize("drafts", ["", "c", "cd", "cx"])
def test_token_inside_the_output_is_taken_in_and_one_that_ends_it_is_left_to_advance(drafts: str) -> None:
    constraint = constraint_of(regex("abcd", stop_token_ids=tokens_of("#")), tokens_of("ab"))
    allowed(constraint, tuple(tokens_of(drafts)))
    (third, last, wrong, stop) = tokens_of("cdx#")
    assert not constraint.advance_inside(stop)
    assert constraint.advance_inside(third)
    assert texts(allowed(constraint)) == {"d"}
    assert not constraint.advance_inside(last)
    assert constraint.error is None
    assert constraint.advance(last)
    assert constraint.is_complete
    refused = constraint_of(regex("abcd"), tokens_of("ab"))
    assert not refused.advance_inside(wrong)
    assert not refused.advance(wrong)


def test_accepted_drafts_leave_the_constraint_where_an_output_that_has_them_is() -> None:
    document = tokens_of('{"name":"a","age":10}')
    constraint = constraint_of(Sampling(grammar=PERSON))
    for start in range(0, len(document), 4):
        drafts = tuple(document[start : start + 4])
        allowed(constraint, drafts)
        for count, token_id in enumerate(drafts[:3], start + 1):
            assert constraint.advance(token_id)
            same = constraint_of(Sampling(grammar=PERSON), document[:count])
            assert constraint.is_complete == same.is_complete
            assert constraint.forced_tokens() == same.forced_tokens()
        for token_id in drafts[3:]:
            assert constraint.advance(token_id)
    assert constraint.is_complete


def test_token_that_may_not_stand_there_is_an_error() -> None:
    constraint = constraint_of(regex("ab"), tokens_of("a"))
    assert not constraint.advance(tokens_of("x")[0])
    assert constraint.error is not None
    assert "does not follow the grammar" in constraint.error
    assert not constraint.advance(tokens_of("b")[0])
    assert not constraint.advance(EOS)
    assert not constraint.is_complete
    assert allowed(constraint) == set(range(VOCAB)), "a row without an allowed token has no distribution"


def test_long_masks_count_together_although_short_ones_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    def times() -> Iterator[float]:
        now = 0.0
        for seconds in itertools.cycle((0.1, 0.0)):
            yield now
            now += seconds
            yield now

    clock = times().__next__
    clocks = SimpleNamespace(perf_counter=clock, thread_time=clock, monotonic=lambda: 0.0)
    monkeypatch.setattr(grammar_budget, "time", clocks)
    constraint = constraint_of(regex("abcd"))
    # The first one is not counted, and each further one by 0.1 s, of which short ones earn nothing back.
    for _ in range(12):
        assert texts(allowed(constraint)) == {"a"}
    assert constraint.error is None
    assert allowed(constraint) == set(range(VOCAB))
    assert constraint.error is not None
    assert "takes too long to follow" in constraint.error
    assert constraint.is_at_fault
    assert constraint.forced_tokens() == []


def test_emitted_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadRequestError, match="emitted so far do not fit") as caught:
        constraint_of(regex("ab"), tokens_of("ac"))
    assert caught.value.param == "emitted"


def test_stop_token_is_allowed_where_the_grammar_accepts() -> None:
    sampling = regex("[a-z]{2,3}", stop_token_ids=tokens_of("#"))
    assert texts(allowed(constraint_of(sampling, tokens_of("a")))) == set("abcdefghijklmnopqrstuvwxyz")
    assert texts(allowed(constraint_of(sampling, tokens_of("ab")))) == {*"abcdefghijklmnopqrstuvwxyz#", "<end>"}


def test_stop_token_of_the_grammar_is_allowed_where_it_accepts_the_output_with_it_or_nothing_else() -> None:
    sampling = regex("[ab]b?b?c", stop_token_ids=tokens_of("bc"))
    assert texts(allowed(constraint_of(sampling))) == {"a"}
    assert texts(allowed(constraint_of(sampling, tokens_of("a")))) == {"c"}
    assert texts(allowed(constraint_of(regex("ab"), ()))) == {"a"}
    assert texts(allowed(constraint_of(regex("ab", stop_token_ids=tokens_of("a"))))) == {"a"}


def test_ignored_end_is_allowed_only_where_nothing_else_may_follow() -> None:
    sampling = regex("a{1,2}", ignore_eos=True)
    assert texts(allowed(constraint_of(sampling, tokens_of("a")))) == {"a"}
    assert constraint_of(sampling, tokens_of("aa")).is_complete


@pytest.mark.parametrize("vocab_size", [VOCAB + 1, VOCAB + 63, 2 * VOCAB])
def test_tokens_that_only_the_model_has_are_never_allowed(vocab_size: int) -> None:
    sampling = regex("[^q]+")
    compiled = compile_grammar(sampling.grammar, tiny_tokenizer(vocab_size))  # type: ignore[arg-type]
    mask = allowed(compiled.constraint(sampling, tokens_of("a")), (), vocab_size)
    assert mask == set(range(VOCAB)) - set(tokens_of("q"))


def test_tokens_that_only_the_tokenizer_has_are_never_allowed() -> None:
    vocab_size, last = VOCAB - 3, tokens_of("}")[0]
    assert last < VOCAB - 3
    tokenizer = tiny_tokenizer(vocab_size, frozenset({tokens_of("$")[0]}))
    sampling = regex("[|}~]+")
    constraint = compile_grammar(sampling.grammar, tokenizer).constraint(sampling, ())  # type: ignore[arg-type]
    assert texts(allowed(constraint, (), vocab_size)) == {"|", "}"}
    only = regex("a~")
    constraint = compile_grammar(only.grammar, tokenizer).constraint(only, tokens_of("a"))  # type: ignore[arg-type]
    assert allowed(constraint, (), vocab_size) == set(range(vocab_size))
    assert constraint.error is not None
    assert "no token that the model has" in constraint.error


def test_model_without_an_end_token_completes_the_grammar() -> None:
    tokenizer = tiny_tokenizer(VOCAB, frozenset())
    sampling = regex("a{1,2}")
    compiled = compile_grammar(sampling.grammar, tokenizer)  # type: ignore[arg-type]
    assert texts(allowed(compiled.constraint(sampling, ()))) == {"a"}
    assert texts(allowed(compiled.constraint(sampling, tokens_of("a")))) == {"a"}
    assert compiled.constraint(sampling, tokens_of("aa")).is_complete


def test_tokens_at_random_make_a_document_of_the_grammar() -> None:
    for seed in range(20):
        constraint, output = constraint_of(Sampling(grammar=PERSON, ignore_eos=seed % 2 == 1)), []
        for position in itertools.count():
            token_id = constraint.some_allowed(hash((seed, position)))
            if token_id == EOS:
                break
            assert constraint.advance(token_id)
            output.append(token_id)
            if constraint.is_complete or position > 300:
                break
        assert re.fullmatch(r'\{\s*"name"\s*:\s*".{0,4}"\s*,\s*"age"\s*:\s*-?\d+\s*\}', text_of(output), re.DOTALL)


SPECIAL = "<|end|>"
GRAMMARS = [
    pytest.param(Grammar(kind="regex", source=r"a<\|end\|>b"), f"a{SPECIAL}b", id="regex"),
    pytest.param(
        Grammar(kind="json_schema", source=f'{{"const":"{SPECIAL}{SPECIAL}"}}'), f'"{SPECIAL}{SPECIAL}"', id="const"
    ),
    pytest.param(Grammar(kind="lark", source=f'start: "{SPECIAL}"'), SPECIAL, id="lark"),
]


@pytest.mark.parametrize("has_own_stop", [False, True])
@pytest.mark.parametrize(("grammar", "text"), GRAMMARS)
def test_masks_spell_the_text_of_a_special_token(grammar: Grammar, text: str, has_own_stop: bool) -> None:
    stops = tokens_of("~") if has_own_stop else ()
    constraint = constraint_of(Sampling(grammar=grammar, stop_token_ids=stops))
    for token_id in tokens_of(text):
        assert token_id in allowed(constraint)
        assert EOS not in allowed(constraint)
        assert constraint.advance(token_id), constraint.error
    assert constraint.is_complete or EOS in allowed(constraint)


@pytest.mark.parametrize(("grammar", "text"), GRAMMARS)
def test_masks_behind_drafts_spell_it_too(grammar: Grammar, text: str) -> None:
    constraint, output = constraint_of(Sampling(grammar=grammar)), tokens_of(text)
    for count in range(len(output)):
        assert output[count] in allowed(constraint, output[:count])
    assert constraint.error is None


@pytest.mark.parametrize(("grammar", "text"), GRAMMARS)
def test_forced_tokens_follow_from_the_grammar(grammar: Grammar, text: str) -> None:
    for start in range(len(text)):
        constraint = constraint_of(Sampling(grammar=grammar), tokens_of(text[:start]))
        forced = constraint.forced_tokens()
        assert text[start:].startswith(text_of(forced))
        assert all(constraint.advance(token_id) for token_id in forced), constraint.error
    assert len(constraint_of(Sampling(grammar=grammar), tokens_of(text[:2])).forced_tokens()) > 1


def test_forced_text_that_ends_within_a_character_is_forced_up_to_it() -> None:
    constraint = constraint_of(Sampling(grammar=Grammar(kind="regex", source=rf"{re.escape(SPECIAL)}(\u20ac|\u20a9)")))
    assert text_of(constraint.forced_tokens()) == SPECIAL


def check_bytes(grammar_tokenizer: GrammarTokenizer, raw: list[bytes]) -> None:
    """Assert that all tokens mean the same bytes, but for special ones, which have none here."""
    tokenizer = grammar_tokenizer.tokenizer
    wrong = {
        token_id: (tokenizer.decode_bytes([token_id]), expected)
        for token_id, expected in enumerate(raw)
        # llguidance has a mark of its own for a byte that is not text by itself.
        if expected not in (b"", b"\xff") and tokenizer.decode_bytes([token_id]) != expected
    }
    assert wrong == {}


def test_bytes_of_the_demo_models_tokens_are_the_same() -> None:
    raw = [TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.vocab_size)]
    check_bytes(TOKENIZER.grammar_tokenizer, raw)


@pytest.mark.parametrize("strips_space", [True, False])
def test_bytes_of_sentencepiece_tokens_are_the_same(strips_space: bool) -> None:
    tokenizer = sentencepiece_tokenizer(strips_space=strips_space)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    table = build_table(tokenizer, tokenizer.to_str().encode(), size)
    assert table is not None
    grammar_tokenizer = GrammarTokenizer(TokenizerSource(tokenizer.to_str(), size, size, frozenset({2})))
    check_bytes(grammar_tokenizer, table.raw)
    grammar = Grammar(kind="regex", source="ab é\n!")
    constraint = compile_grammar(grammar, grammar_tokenizer).constraint(Sampling(grammar=grammar), ())
    ids = [tokenizer.token_to_id(token) for token in ("ab", "▁", "é", "<0x0A>", "!")]
    assert all(map(constraint.advance, ids))
    assert constraint.is_complete


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "sentencepiece"])
def test_gguf_tokenizer_follows_a_grammar(tmp_path: Path, name: str) -> None:
    vocabulary = sentencepiece_vocabulary() if name == "sentencepiece" else byte_pair_vocabulary(name)
    size = len(vocabulary.tokens)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": size}
    path = tmp_path / "model.gguf"
    write_model(path, "llama-F32", vocabulary, **sizes)
    directory = read_model_directory(path)
    tokenizer = ModelTokenizer(directory)
    grammar_tokenizer = tokenizer.grammar_tokenizer
    assert grammar_tokenizer.eos_token_ids == directory.eos_token_ids
    check_bytes(grammar_tokenizer, [tokenizer.token_bytes(token_id) for token_id in range(size)])
    grammar = Grammar(kind="json_schema", source='{"type": "array", "items": {"type": "integer"}}')
    constraint = compile_grammar(grammar, grammar_tokenizer).constraint(Sampling(grammar=grammar), ())
    for text in ("[", "1", "]"):
        # Sentencepiece may have a token of the character and one of its byte.
        token_id = next(index for index in range(size) if tokenizer.token_bytes(index) == text.encode())
        assert constraint.advance(token_id)
    assert constraint.is_complete


@pytest.mark.parametrize("content", [wordpiece_tokenizer().to_str(), "{}"])
def test_tokenizer_without_bytes_or_without_anything_is_refused(content: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match="its tokenizer is not supported"):
        GrammarTokenizer(TokenizerSource(content, 7, 7, frozenset({2})))


OPEN, CLOSE = VOCAB, VOCAB + 1


def _tokenizer_with_tags() -> GrammarTokenizer:
    """Return a tokenizer like Qwen's: the tags of calls are tokens, though none that are left out of the text."""
    content = json.loads(tokenizer_json())
    tag = {"special": False, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"] += [
        {"id": OPEN, "content": "<tool_call>", **tag},
        {"id": CLOSE, "content": "</tool_call>", **tag},
    ]
    return GrammarTokenizer(TokenizerSource(json.dumps(content), VOCAB + 2, VOCAB + 2, frozenset({EOS})))


def test_special_tokens_are_known_by_their_text() -> None:
    special = {"<|end|>": EOS, "<tool_call>": OPEN, "</tool_call>": CLOSE}
    assert _tokenizer_with_tags().special_tokens == special


def test_model_writes_the_tags_of_a_call_as_its_own_tokens() -> None:
    strict = Tool("f", json.dumps({"type": "object", "properties": {}, "additionalProperties": False}), strict=True)
    call = (OPEN, *tokens_of('\n{"name": "f", "arguments": {}}\n'), CLOSE)
    for mode, before in (("required", ()), ("auto", tokens_of("I look."))):
        grammar = format_named("hermes").grammar([strict], ToolChoice(mode))
        assert grammar is not None
        compiled = compile_grammar(grammar, _tokenizer_with_tags())
        constraint = compiled.constraint(Sampling(grammar=grammar), before)
        assert all(map(constraint.advance, (*call, EOS)))


def test_grammar_of_a_client_is_left_as_it_is() -> None:
    grammar = Grammar(kind="lark", source='start: "<tool_call>"')
    constraint = compile_grammar(grammar, _tokenizer_with_tags()).constraint(Sampling(grammar=grammar), ())
    assert not constraint.advance(OPEN)
