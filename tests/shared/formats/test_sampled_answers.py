"""Answers drawn from the grammars at random: what a grammar allows, the reader understands."""

from __future__ import annotations

import itertools
import random

import pytest

from shared.formats import ChatFormat, ToolChoice, format_named
from shared.grammar import Grammar
from tests.shared.formats.reading import read, understood
from tests.shared.formats.tools import SCHEMAS, tools
from tests.shared.formats.vocabulary import END, Vocabulary, vocabularies
from tests.shared.formats.writers import WRITERS

_MAX_TOKENS = 1200
_PRINTABLE = range(32, 127)


def _wishes(spoken: ChatFormat) -> list[str]:
    """Return texts that close open markup: chance alone would not find them."""
    tags = [*spoken.reasoning.closes] if spoken.reasoning else []
    marks = [each for form in spoken.calls for each in (*form.opens, *form.closes)]
    quotes = ['"', "}", "]", ")", '"}']
    ends = ["</parameter>", "\n</parameter>", "</arg_value>", "</｜DSML｜parameter>", "<escape>", '<|"|>']
    return [*tags, *marks, *quotes, *ends, "get", "\n", " "]


def _sample(vocabulary: Vocabulary, grammar: Grammar, wishes: list[str], chance: random.Random) -> str | None:
    """Return an answer that the grammar allows; None if it found no end."""
    matcher = vocabulary.matcher(grammar)
    ids: list[int] = []
    wish: list[int] = []
    while len(ids) < _MAX_TOKENS:
        allowed = matcher.compute_logit_bias()
        if allowed[END] and chance.random() < 0.3:
            return vocabulary.decode(ids)
        if not wish and chance.random() < (0.4 if len(ids) < 60 else 0.95):
            wish = vocabulary.encode(chance.choice(wishes))
        if wish and allowed[wish[0]]:
            token = wish.pop(0)
        else:
            wish = []
            token = chance.choice([each for each in range(len(allowed)) if allowed[each] and each != END] or [END])
            if any(map(allowed.__getitem__, _PRINTABLE)):
                token = chance.choice([each for each in _PRINTABLE if allowed[each]])
        if token == END:
            return vocabulary.decode(ids)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


def _check(name: str, mode: str, num_samples: int, seed: int) -> None:
    spoken = format_named(name)
    chance = random.Random(seed)
    # In turn: with and without tokens for markers, with and without reasoning.
    ways = itertools.cycle(itertools.product(vocabularies(spoken), (True, False)))
    num_ended = 0
    for vocabulary, reasoning in itertools.islice(ways, num_samples):
        grammar = spoken.grammar(tools(strict=True), ToolChoice(mode), reasoning=reasoning)  # type: ignore[arg-type]
        assert grammar is not None
        text = _sample(vocabulary, grammar, _wishes(spoken), chance)
        if text is None:
            continue
        num_ended += 1
        found = understood(read(spoken, [text], tools(strict=True)))
        for called, arguments in found.calls:
            assert vocabulary.accepts(Grammar(kind="json_schema", source=SCHEMAS[called]), arguments), (text, arguments)
        if mode == "required":
            assert found.calls, text
            assert found.content == "", text
        assert not any(form.opens[0] in found.content for form in spoken.calls), text
    assert num_ended >= num_samples / 2


# Families with other grammars than all the others.
@pytest.mark.parametrize(
    "name",
    [
        *("hermes-thinking", "qwen-coder", "glm", "deepseek-r1", "deepseek-v3.2", "mistral", "mistral-list"),
        *("llama-json", "llama-pythonic", "gemma", "harmony"),
    ],
)
def test_sampled_answer_is_understood(name: str) -> None:
    _check(name, "required", 4, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("name", WRITERS)
def test_many_sampled_answers_are_understood(name: str, mode: str) -> None:
    _check(name, mode, 80, seed=5)
