from __future__ import annotations

import json

from gpu_worker.structured_output.compiled_grammar import compile_grammar
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from shared.formats import Tool, ToolChoice, format_named
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, VOCAB, tokenizer_json, tokens_of

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
