from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.structured_output import compiled_grammar, grammar_budget
from gpu_worker.structured_output.compiled_grammar import GrammarCache, compile_grammar
from gpu_worker.structured_output.grammar_budget import GrammarBudget
from gpu_worker.structured_output.grammar_constraint import GrammarConstraint
from shared.grammar import GRAMMAR_PARAM, Grammar, GrammarError, check_grammar, grammar_text
from shared.sampling import Sampling
from tests.gpu_worker.structured_output.tiny_tokenizer import compiled, tiny_tokenizer, tokens_of
from tests.shared.grammar.schemas import schemas, written_document


def schema(content: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(content))


def regex(source: str) -> Grammar:
    return Grammar(kind="regex", source=source)


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "nonsense"}),
        schema({"$ref": "https://example.com/schema"}),
        schema({"type": "object", "unheard-of": 1, "not": {"type": "string"}}),
        Grammar(kind="json_schema", source="{"),
        regex("(a"),
        regex("(?=a)b"),
        Grammar(kind="lark", source="start: missing"),
        schema({"type": "object", "properties": {f"p{number}": {} for number in range(2000)}}),
    ],
)
def test_grammar_that_cannot_be_followed_is_refused_with_the_reason(grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(grammar, tiny_tokenizer())
    assert caught.value.param == GRAMMAR_PARAM
    assert len(caught.value.reason) > 10


def test_grammar_whose_masks_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MAX_WARM_UP_S", 0.05)
    compile_grammar(schema({"const": "xyz " * 20}), tiny_tokenizer())
    grammar = schema({"const": "xyz " * 20_000})
    with pytest.raises(GrammarError, match="takes too long to follow"):
        compile_grammar(grammar, tiny_tokenizer())


def fill_masks(monkeypatch: pytest.MonkeyPatch, count: int, **clocks: Iterator[float]) -> tuple[int, GrammarConstraint]:
    """Compute masks by such clocks until one is refused; return how many there were, and the constraint."""
    constraint = compiled(regex("[ab]+")).constraint(Sampling(), ())
    for name, times in clocks.items():
        monkeypatch.setattr(grammar_budget.time, name, lambda times=times: next(times))
    mask = np.zeros(4, dtype=np.int32)
    num_filled = 0
    while num_filled < count and constraint.error is None:
        constraint.fill_mask((), mask.ctypes.data)
        num_filled += 1
    assert constraint.error is None or np.all(mask == -1)
    return num_filled, constraint


def test_sequence_whose_masks_take_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.05, 0.05)
    count, constraint = fill_masks(monkeypatch, 50, perf_counter=clock, thread_time=clock)
    # From the first long one on they are watched; half a second is what they may take together.
    assert count == 1 + 11
    assert constraint.error is not None
    assert "takes too long to follow" in constraint.error


def test_sequence_does_not_end_because_other_programs_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time passes, and the thread computes next to nothing.
    _, constraint = fill_masks(monkeypatch, 50, perf_counter=itertools.count(0.05, 0.05))
    assert constraint.error is None


def test_sequence_does_not_end_because_the_host_paused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second mask, which is watched because the first took long.
    clock = itertools.chain([0.0, 0.01, 0.01], itertools.repeat(60.0))
    _, constraint = fill_masks(monkeypatch, 11, perf_counter=clock, thread_time=clock)
    assert constraint.error is None


NESTED = "start: a\na: a b | b a | b\nb: b c | c b | c\nc: c a | a c | /[a-z]/\n"
MANY_RULES = "start: s\ns: s s | " + " | ".join(f"x{number} s" for number in range(60)) + ' | "z"\n'
MANY_RULES += "".join(f"x{number}: /[a-z]{{1,{number + 2}}}/\n" for number in range(60))


@pytest.mark.parametrize("source", [NESTED, MANY_RULES])
def test_tenant_with_many_slow_sequences_holds_others_up_for_no_longer_than_with_one(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of MANY_RULES take a millisecond each, those of NESTED up to a second; a request has 128 sequences."""
    # A busy machine's time would give the budget back.
    monkeypatch.setattr(grammar_budget.time, "monotonic", time.thread_time)
    grammar, budget = compiled(Grammar(kind="lark", source=source)), GrammarBudget()
    sequences = [grammar.constraint(Sampling(), (), budget) for _ in range(128)]
    started = time.thread_time()
    for number in range(900):
        sequences = [each for each in sequences if each.error is None]
        for each in sequences:
            each.advance(each.some_allowed(number))
    # Without a budget 20 s and more.
    assert time.thread_time() - started < 8
    assert not sequences
    ended = grammar.constraint(Sampling(), (), budget)
    ended.fill_mask((), np.zeros(4, dtype=np.int32).ctypes.data)
    assert ended.error is not None or not budget.is_overdrawn
    other = compiled(regex("[ab]+")).constraint(Sampling(), (), GrammarBudget())
    assert all(other.advance(other.some_allowed(number)) for number in range(20))


def test_budget_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr(grammar_budget.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(grammar_budget.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(grammar_budget.time, "monotonic", lambda: now)
    now = 1000.0
    budget = GrammarBudget()
    assert [budget.spend(budget.now()) for _ in range(7)] == [True] * 6 + [False]
    while not budget.is_overdrawn:
        budget.spend(budget.now())
    now += 1.0
    assert not budget.is_overdrawn
    assert not budget.spend(budget.now())
    now += 3.0
    assert budget.spend(budget.now())


def test_tenants_together_get_back_less_than_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(grammar_budget.time, "monotonic", lambda: now)
    monkeypatch.setattr(grammar_budget.time, "thread_time", lambda: now)
    monkeypatch.setattr(grammar_budget.time, "perf_counter", lambda: now)
    total = GrammarBudget(share=grammar_budget.TOTAL_SHARE)
    greedy, modest = [GrammarBudget(total) for _ in range(5)], GrammarBudget(total)
    num_spent = 0
    for number in range(2000):
        since, now = now, now + 0.02
        each = greedy[number % 5]
        if not each.is_overdrawn:
            each.spend(since)
            num_spent += 1
    # Of 40 s: five bursts and debts of theirs, and their share of the time; each alone would get a fifth.
    assert num_spent * 0.02 < 5 * 2 * grammar_budget.BURST_S + 40 * grammar_budget.TOTAL_SHARE + 1
    assert all(modest.spend(now - 0.001) for _ in range(100))


def test_forced_tokens_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.05, 0.05)
    constraint = compiled(regex("ab" * 40)).constraint(Sampling(), ())
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(grammar_budget.time, name, lambda: next(clock))
    for token_id in tokens_of("ab" * 40):
        constraint.forced_tokens()
        if not constraint.advance(token_id):
            break
    assert constraint.error is not None


def test_constraints_of_a_grammar_do_not_disturb_each_other() -> None:
    grammar = compiled(regex("ab|cd"))
    one, other = grammar.constraint(Sampling(), ()), grammar.constraint(Sampling(), ())
    assert one.advance(tokens_of("a")[0])
    assert other.advance(tokens_of("c")[0])
    assert (one.some_allowed(0), other.some_allowed(0)) == (*tokens_of("b"), *tokens_of("d"))


def test_forced_tokens_are_those_without_a_choice() -> None:
    constraint = compiled(schema({"enum": ["left side", "left over"]})).constraint(Sampling(), tokens_of('"'))
    assert constraint.forced_tokens() == list(tokens_of("left "))
    assert constraint.allows(tokens_of("left o"))
    assert not constraint.allows(tokens_of("left x"))
    assert constraint.forced_tokens() == list(tokens_of("left "))


class Sized:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def add(cache: GrammarCache, tenant: str, name: str, num_bytes: int) -> None:
    cache.add(tenant, regex(name), Sized(num_bytes))  # type: ignore[arg-type]


def kept(cache: GrammarCache, tenant: str, names: str) -> str:
    return "".join(name for name in names if cache.get(tenant, regex(name)) is not None)


def test_cache_drops_what_was_not_used_for_longest() -> None:
    cache = GrammarCache(max_bytes=100, max_tenant_grammars=3)
    for name in "abc":
        add(cache, "t", name, 10)
    assert kept(cache, "t", "a") == "a"
    add(cache, "t", "d", 10)
    assert kept(cache, "t", "abcd") == "acd"
    add(cache, "t", "e", 85)
    assert kept(cache, "t", "acde") == "de"


def test_tenant_with_much_in_the_cache_makes_room_for_others() -> None:
    cache = GrammarCache(max_bytes=100)
    add(cache, "small", "a", 20)
    for name in "bcdefgh":
        add(cache, "large", name, 20)
    assert kept(cache, "small", "a") == "a"
    assert kept(cache, "large", "bcdefgh") == "efgh"


def test_tenant_finds_nothing_of_others() -> None:
    cache = GrammarCache()
    add(cache, "one", "a", 1)
    assert kept(cache, "other", "a") == ""


def test_grammar_larger_than_the_cache_is_not_kept() -> None:
    cache = GrammarCache(max_bytes=10)
    add(cache, "t", "a", 11)
    assert kept(cache, "t", "a") == ""
    add(cache, "t", "b", 10)
    assert kept(cache, "t", "b") == "b"


def test_cache_is_emptied_when_its_grammars_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = 0
    monkeypatch.setattr(compiled_grammar, "resident_bytes", lambda: 10**9 + grown)
    cache = GrammarCache()
    add(cache, "t", "a", 1)
    grown = compiled_grammar.MAX_GROWTH_BYTES
    add(cache, "t", "b", 1)
    assert kept(cache, "t", "ab") == "ab"
    grown += 1
    add(cache, "t", "c", 1)
    assert kept(cache, "t", "abc") == ""
    # What it has grown to is no reason to empty it again.
    add(cache, "t", "d", 1)
    assert kept(cache, "t", "d") == "d"


def test_limits_are_far_from_what_is_usual() -> None:
    grammar = schema({"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(60)}})
    constraint = compile_grammar(grammar, tiny_tokenizer()).constraint(Sampling(), ())
    assert isinstance(constraint, GrammarConstraint)
    assert compiled_grammar.MAX_WARM_UP_S > 0


def test_grammar_with_a_large_automaton_counts_with_its_size() -> None:
    large = compile_grammar(schema({"type": "integer", "multipleOf": 9_973}), tiny_tokenizer())
    assert large.num_bytes > 8_000_000
    round_one = compile_grammar(schema({"type": "integer", "multipleOf": 100_000_000}), tiny_tokenizer())
    assert round_one.num_bytes > 4_500_000
    assert compile_grammar(schema({"type": "integer"}), tiny_tokenizer()).num_bytes < 1_000_000


def test_divisor_that_would_take_seconds_is_refused_before_it_is_compiled() -> None:
    started = time.thread_time()
    with pytest.raises(GrammarError, match="multipleOf"):
        compile_grammar(schema({"type": "integer", "multipleOf": 999_983}), tiny_tokenizer())
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex(r"[^\s\S]"), "matches no text"),
        (Grammar(kind="gbnf", source="root ::= a\na ::= b\nb ::= a"), "matches no text"),
        (Grammar(kind="lark", source='start: %json {"$ref": "#"}'), "No document of finite length matches"),
    ],
)
def test_grammar_without_any_text_is_refused_in_words(grammar: Grammar, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compile_grammar(grammar, tiny_tokenizer())


def test_grammar_that_reaches_a_limit_on_the_way_is_at_fault() -> None:
    constraint = compiled(regex("(?i)" + "(?:x?){100}" * 50)).constraint(Sampling(), ())
    for number in range(1_000):
        if not constraint.advance(constraint.some_allowed(number * 7919 + 1)):
            break
    assert constraint.error is not None
    assert "cannot be followed" in constraint.error or "takes too long" in constraint.error
    assert constraint.is_at_fault


def test_token_that_a_mask_should_have_kept_away_is_no_fault_of_the_grammar() -> None:
    constraint = compiled(regex("ab")).constraint(Sampling(), ())
    assert not constraint.is_at_fault
    assert not constraint.advance(tokens_of("c")[0])
    assert constraint.error is not None
    assert not constraint.is_at_fault


# Patterns are those of ECMA-262. Python's \\S leaves out four control characters as well.
NO_SPACE = r"[^\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"


def compiles_and_matches(schema: Any, seed: int) -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps(schema), strict=True)
    try:
        check_grammar(grammar)
    except GrammarError:
        return
    compile_grammar(grammar, tiny_tokenizer())
    text = written_document(grammar_text(grammar), random.Random(seed))
    if text is not None:
        validator = jsonschema.Draft202012Validator(json.loads(grammar.source.replace(r"\\S", NO_SPACE)))
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
