"""What a change of the table may do, which requests a canary gets, and what its measurement leaves of an answer."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.aliases.book import MAX_COUNTED, AliasBook, LogprobTap, conversation_of
from gateway.aliases.table import (
    MAX_RUNNING,
    Alias,
    AliasTable,
    Rules,
    end_canary,
    remove_alias,
    set_alias,
    set_percent,
    start_canary,
)
from gateway.batches.line import PARSERS
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from gateway.generation import Generation
from shared.adapter_calls import AdapterBeat
from shared.adapter_files import AdapterContent
from shared.adapter_names import NamedAdapter
from shared.messages import Delta, Lane, TokenLogprob
from tests.gateway.fleet.test_fleet import Watched

MODELS = {"one", "two", "three"}
FLEET = cast(
    "Fleet",
    SimpleNamespace(
        knows=MODELS.__contains__,
        settles=lambda name, tenant: name in MODELS,
        find_adapter=lambda name, tenant: None,
        num_workers=lambda model: int(model in MODELS),
    ),
)


def table(tenant: str | None = None) -> AliasTable:
    return set_alias(AliasTable(), "chat", "one", tenant, MODELS.__contains__, MODELS.__contains__, 5.0)


def with_canary(percent: float = 25.0, before: AliasTable | None = None, **rules: Any) -> AliasTable:
    known = MODELS.__contains__
    return start_canary(before or table(), "chat", None, "two", percent, Rules(**rules), 0.0, known)


def book(of: AliasTable) -> AliasBook:
    made = AliasBook()
    made.take(of)
    return made


def asked(text: str = "hi", **fields: Any) -> Generation:
    body = {"model": "chat", "prompt": text, "max_tokens": 4, **fields}
    return PARSERS["/v1/completions"](json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "model", "status", "told"),
    [
        ("one", "two", 400, "is a served model"),
        ("x", "gone", 404, "No worker serves the model `gone`"),
        ("x", "chat", 400, "is an alias itself"),
        ("x", "x", 404, "No worker serves the model `x`"),
        ("gone", "two", 400, "aliases of aliases"),
        ("a b", "one", 400, "'name' must not contain white space"),
        ("a\u202eb", "one", 400, "'name' must not contain white space, or characters that do not print"),
        ("x" * 129, "one", 400, "'name' must be 1 to 128 bytes long"),
        ("a\0b", "one", 400, "'name' must not contain a NUL"),
        ("..", "one", 400, "'name' must not be '.' or '..'"),
    ],
)
def test_alias_that_hides_chains_or_leads_nowhere_is_refused(name: str, model: str, status: int, told: str) -> None:
    before = AliasTable((*table().aliases, Alias(name="old", model="gone", tenant=None)))
    with pytest.raises(ApiError, match=told) as refused:
        set_alias(before, name, model, None, MODELS.__contains__, MODELS.__contains__, 5.0)
    assert refused.value.status == status


def test_alias_of_a_tenant_whose_name_holds_a_control_character_is_refused() -> None:
    with pytest.raises(ApiError, match="'tenant' must not contain control characters") as refused:
        table("nobody\n")
    assert (refused.value.status, refused.value.param) == (400, "tenant")
    assert table("caf\u00e9\u00a0bar").aliases[0].tenant == "caf\u00e9\u00a0bar"


def test_own_alias_of_a_tenant_comes_before_that_of_all_and_a_model_hides_both() -> None:
    both = set_alias(table(), "chat", "two", "acme", MODELS.__contains__, MODELS.__contains__, 5.0)
    aliases = book(both)
    assert (aliases.target("chat", "acme", FLEET), aliases.target("chat", "other", FLEET)) == ("two", "one")
    assert aliases.visible("acme", FLEET) == {"chat": "two"}
    hidden = cast("Fleet", SimpleNamespace(settles=lambda name, tenant: True))
    assert aliases.target("chat", "acme", hidden) == "chat"
    assert book(remove_alias(both, "chat", "acme")).target("chat", "acme", FLEET) == "one"


def test_operators_words_hide_an_alias_and_those_of_workers_alone_do_not() -> None:
    watched = Watched()
    watched.hear(worker="w", model="one")
    watched.hear(worker="liar", model="blue", adapters=(AdapterBeat("chat", "1" * 64),))
    fleet, aliases = watched.fleet, book(table())
    assert aliases.settled(asked(), "t", fleet).model == "one"
    assert aliases.visible("t", fleet) == {"chat": "one"}
    content = AdapterContent("2" * 64, 8)
    fleet.named_adapters.note(NamedAdapter("chat", "t", "one", content))
    assert [aliases.target("chat", tenant, fleet) for tenant in ("t", "other")] == ["chat", "one"]
    watched.hear(worker="w2", model="chat")
    assert aliases.target("chat", "other", fleet) == "chat"


def test_name_that_only_workers_give_stops_a_new_alias_and_no_change_of_one() -> None:
    told, hidden = {"one", "two", "chat", "new"}.__contains__, MODELS.__contains__
    changed = set_alias(table(), "chat", "two", None, told, hidden, 5.0)
    assert [(each.name, each.model) for each in changed.aliases] == [("chat", "two")]
    with pytest.raises(ApiError, match="'new' is a served model or adapter: an alias must not hide it"):
        set_alias(table(), "new", "two", None, told, hidden, 5.0)
    # An alias of another tenant is none of these.
    with pytest.raises(ApiError, match="must not hide it"):
        set_alias(table("acme"), "chat", "two", "other", told, hidden, 5.0)


def test_share_grows_and_conversations_that_the_canary_has_stay() -> None:
    started = with_canary(25.0)
    before, after = book(started), book(set_percent(started, "chat", None, 60.0))
    bodies = [b'{"user": "u%d"}' % n for n in range(2000)]

    def arms(aliases: AliasBook) -> set[bytes]:
        return {
            body
            for body in bodies
            if aliases.split(asked(), "t", FLEET, conversation_of(asked(), body))[0].model == "two"
        }

    few, more = arms(before), arms(after)
    assert few < more
    assert len(few) / 2000 == pytest.approx(0.25, abs=0.05)
    assert len(more) / 2000 == pytest.approx(0.60, abs=0.05)
    # A repetition, or another prompt of the same user, gets the same arm.
    repeated = {
        body
        for body in bodies
        if before.split(asked("else"), "t", FLEET, conversation_of(asked("else"), body))[0].model == "two"
    }
    assert repeated == few


def test_promoted_canary_is_the_model_and_a_rolled_back_one_is_not() -> None:
    started = with_canary()
    assert book(end_canary(started, "chat", None, "promoted", "", 1.0)).target("chat", "t", FLEET) == "two"
    back = end_canary(started, "chat", None, "rolled_back", "slow", 1.0)
    assert {book(back).split(asked(), "t", FLEET, b"%d" % n)[0].model for n in range(50)} == {"one"}
    with pytest.raises(ApiError, match="No canary of the alias 'chat' runs"):
        end_canary(back, "chat", None, "rolled_back", "again", 2.0)


@pytest.mark.parametrize(("model", "state"), [("three", "rolled_back"), ("two", "promoted")])
def test_alias_that_is_set_ends_its_canary_which_stays_visible(model: str, state: str) -> None:
    served = {*MODELS, "three"}.__contains__
    changed = set_alias(with_canary(), "chat", model, None, served, lambda _name: False, 5.0)
    (alias,) = changed.aliases
    assert (alias.model, alias.running) == (model, None)
    assert alias.canary is not None
    assert (alias.canary.state, alias.canary.ended) == (state, 5.0)
    assert alias.canary.reason == f"the alias was set to {model}"
    # One that has ended is as it was.
    (again,) = set_alias(changed, "chat", "one", None, served, lambda _name: False, 6.0).aliases
    assert again.canary == alias.canary


def test_canary_without_workers_gets_no_requests() -> None:
    empty = cast(
        "Fleet",
        SimpleNamespace(
            settles=lambda name, tenant: False, find_adapter=lambda name, tenant: None, num_workers=lambda model: 0
        ),
    )
    generation, probe = book(with_canary(100.0)).split(asked(), "t", empty, b"{}")
    assert (generation.model, generation.name) == ("one", "chat")
    # The other arm alone says nothing about it.
    assert probe is None


def test_log_probabilities_are_measured_and_taken_out_of_the_answer() -> None:
    aliases = book(with_canary(100.0, logprob_share=1.0))
    _, probe = aliases.split(asked(), "t", FLEET, b"{}")
    assert probe is not None
    assert probe.wants_logprobs
    seen: list[Delta] = []
    sink = cast("Any", SimpleNamespace(deliver=seen.append, fail=seen.append))
    plain = Delta("r", 0, 0, (1, 2), "ab")
    tokens = (TokenLogprob(1, "a", b"a", -1.0), TokenLogprob(2, "b", b"b", -3.0))
    measured = msgspec.structs.replace(plain, logprobs=tokens)
    LogprobTap(sink, probe, hides=True).deliver(measured)
    LogprobTap(sink, probe, hides=False).deliver(measured)
    assert [msgspec.msgpack.encode(each) for each in seen] == [msgspec.msgpack.encode(x) for x in (plain, measured)]
    probe.answered(0.1, 0.01)
    (arms,) = aliases.own.values()
    assert (arms.canary.requests, arms.stable.requests, arms.canary.logprob) == (1, 0, -2.0)
    # One request has no percentiles.
    assert arms.canary.perplexity.quantile(0.5) is None
    _, probe = aliases.split(asked(), "t", FLEET, b"{}")
    assert probe is not None
    LogprobTap(sink, probe, hides=True).deliver(measured)
    probe.answered(0.1, 0.01)
    assert arms.canary.perplexity.quantile(0.5) == pytest.approx(math.exp(2), rel=0.05)


FAULTS = [(500, None, 1), (503, None, 1), (408, None, 1), (400, None, 0), (429, None, 0), (503, "shutting_down", 0)]
FAULTS += [(503, "no_worker", 1), (503, "overloaded", 0), (503, "queue_full", 0)]


@pytest.mark.parametrize(("status", "code", "counted"), [*FAULTS, (400, "context_length_exceeded", 1)])
def test_faults_of_the_server_and_the_model_count_as_errors(status: int, code: str | None, counted: int) -> None:
    aliases = book(with_canary(100.0))
    _, probe = aliases.split(asked(), "t", FLEET, b"{}")
    assert probe is not None
    probe.failed(ApiError(status, "x", code=code))
    (arms,) = aliases.own.values()
    assert (arms.canary.requests, arms.canary.errors) == (counted, counted)


def test_late_answers_of_clients_that_leave_too_little_time_say_nothing_of_a_canary() -> None:
    aliases = book(with_canary(100.0))
    _, probe = aliases.split(asked(timeout=0.2), "t", FLEET, b"{}")
    assert probe is not None
    probe.failed(ApiError(408, "x"))
    (arms,) = aliases.own.values()
    assert (arms.canary.requests, arms.canary.errors) == (0, 0)
    probe.failed(ApiError(500, "x"))
    assert arms.canary.errors == 1


def test_user_who_asks_all_day_counts_as_a_few_requests() -> None:
    aliases = book(with_canary(50.0))
    one, others = conversation_of(asked(), b'{"metadata": {"user_id": "program"}}'), [b"%d" % n for n in range(40)]
    probes = [aliases.split(asked(), "t", FLEET, each)[1] for each in [one] * 200 + others]
    assert sum(probe is not None for probe in probes) == MAX_COUNTED + 40


def test_conversation_is_told_by_its_user_or_by_how_it_begins() -> None:
    def told(messages: list[str], **fields: Any) -> bytes:
        written = [
            {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, messages, strict=False)
        ]
        body = json.dumps({"model": "chat", "messages": written, **fields}).encode()
        return conversation_of(PARSERS["/v1/chat/completions"](body), body)

    assert told(["a"]) == told(["a", "b", "c"]) != told(["b"])
    assert told(["a"], user="u") == told(["b"], safety_identifier="u") == told(["c"], metadata={"user_id": "u"})


def test_only_so_many_aliases_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.aliases.table.MAX_ALIASES", 2)
    of = set_alias(table(), "second", "one", None, MODELS.__contains__, MODELS.__contains__, 5.0)
    with pytest.raises(ApiError, match="There are 2 aliases"):
        set_alias(of, "third", "one", None, MODELS.__contains__, MODELS.__contains__, 5.0)
    assert set_alias(of, "second", "two", None, MODELS.__contains__, MODELS.__contains__, 5.0).aliases[1].model == "two"


def test_canary_of_another_id_is_not_ended() -> None:
    of = with_canary()
    canary = of.aliases[0].running
    assert canary is not None
    with pytest.raises(ApiError, match="has ended"):
        end_canary(of, "chat", None, "promoted", "", 1.0, "0" * 16)
    assert end_canary(of, "chat", None, "promoted", "", 1.0, canary.id).aliases[0].model == "two"


def test_only_so_many_canaries_run_at_once() -> None:
    of = AliasTable()
    for number in range(MAX_RUNNING + 1):
        of = set_alias(of, f"alias-{number}", "one", None, MODELS.__contains__, MODELS.__contains__, 5.0)
    for number in range(MAX_RUNNING):
        of = start_canary(of, f"alias-{number}", None, "two", 1.0, Rules(), 0.0, MODELS.__contains__)
    with pytest.raises(ApiError, match="32 canaries run"):
        start_canary(of, f"alias-{MAX_RUNNING}", None, "two", 1.0, Rules(), 0.0, MODELS.__contains__)


def test_second_canary_of_an_alias_and_one_of_its_own_model_are_refused() -> None:
    started, known = with_canary(), MODELS.__contains__
    own_model = set_alias(table(), "chat", "two", None, known, known, 5.0)
    for before, told in ((started, "has a canary already"), (own_model, "stands for 'two' already")):
        with pytest.raises(ApiError, match=told) as refused:
            with_canary(before=before)
        assert refused.value.status == 400
    # One that has ended makes way.
    with_canary(before=end_canary(started, "chat", None, "rolled_back", "slow", 1.0))


@pytest.mark.parametrize(
    ("name", "lane", "has"), [("chat", "interactive", True), ("chat", "batch", False), ("one", "interactive", False)]
)
def test_model_follows_from_a_conversation_where_an_answer_is_awaited_from_an_alias_with_a_canary(
    name: str, lane: Lane, has: bool
) -> None:
    generation = msgspec.structs.replace(asked(), model=name, lane=lane)
    assert book(with_canary()).has_canary(generation, "t", FLEET) is has
    assert book(table()).has_canary(generation, "t", FLEET) is False
