"""Text that reads like a special token is forced as text: by masks, by masks behind drafts, and as forced tokens."""

from __future__ import annotations

import re

import pytest

from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, allowed, constraint_of, text_of, tokens_of

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
