from __future__ import annotations

from shared.grammar import Grammar


def test_grammar_begun_in_reasoning_has_another_start() -> None:
    grammar = Grammar(kind="lark", source='start: a | b\na: "1"\nb: "2"\n', in_reasoning="THOUGHT a")
    assert grammar.begun_in_reasoning() == Grammar(kind="lark", source='start: THOUGHT a\na: "1"\nb: "2"\n')


def test_grammar_that_holds_in_reasoning_too_stays_the_same() -> None:
    grammar = Grammar(kind="regex", source="a+")
    assert grammar.begun_in_reasoning() is grammar
