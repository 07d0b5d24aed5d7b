"""Which queues a worker takes from, by its role and by who else is there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker.consumer.prefixes.peers import PeerBeat
from gpu_worker.consumer.roles import HEARD_S, LEFT_S, MAX_PEERS, MISSED_S, READY_MEMORY_S, Roles
from shared.consumers import Deliveries
from shared.disaggregation import PROMPT_QUEUES, Role, RoleNews, TakenQueue
from shared.prefixes import PrefixNews

EVERYTHING = (*PROMPT_QUEUES, "ready")
START = 1000.0


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: START)


def beat(worker: str, role: Role | None, *, draining: bool = False, maker: str = "m", takes: Any = None) -> PeerBeat:
    """Return the heartbeat of a worker; without a role it is of an earlier version, and does not listen to others."""
    if takes is None:
        takes = ("ready",) if role == "decode" else PROMPT_QUEUES
    news = None if role is None else RoleNews(role, takes, "127.0.0.1:7", maker)
    return PeerBeat(worker=worker, draining=draining, roles=news, prefixes=PrefixNews() if role else None)


Make = Callable[..., Roles]


def roles(role: Role, *beats: PeerBeat, at: float = START + 10) -> Roles:
    made = Roles("own", role)
    made.maker = "m"
    for each in beats:
        made.note(each, at)
    return made


NOW = START + 10.1


@pytest.mark.parametrize(
    ("role", "others", "expected"),
    [
        ("prefill", [], PROMPT_QUEUES),
        ("prefill", ["decode"], PROMPT_QUEUES),
        ("decode", ["prefill"], ("ready",)),
        ("decode", ["both"], ("ready",)),
        ("decode", [None], ("ready",)),
        ("decode", [], EVERYTHING),
        ("decode", ["decode"], EVERYTHING),
        ("both", [], PROMPT_QUEUES),
        ("both", ["decode"], PROMPT_QUEUES),
        ("both", ["prefill"], EVERYTHING),
    ],
)
def test_queues_by_role_and_company(role: Role, others: list[Role | None], expected: tuple[str, ...]) -> None:
    made = roles(role, *(beat(f"w{number}", other) for number, other in enumerate(others)))
    assert made.takes(NOW) == expected


def test_a_decode_worker_whose_last_prefill_worker_is_silent_or_drains_does_it_all() -> None:
    made = roles("decode", beat("p", "prefill"))
    assert made.takes(NOW) == ("ready",)
    assert made.takes(START + 10 + HEARD_S - 0.1) == ("ready",)
    assert made.takes(START + 10 + HEARD_S + 0.1) == EVERYTHING
    made.note(beat("p", "prefill", draining=True), NOW)
    assert made.takes(NOW) == EVERYTHING


def test_a_decode_worker_asks_for_those_alone_that_left_prompts_to_it_and_miss_a_heartbeat() -> None:
    made = roles("decode", beat("p", "prefill"), beat("old", None), beat("d", "decode"))
    late = START + 10 + MISSED_S + 0.1
    assert (made.missed(NOW), made.missed(late), made.missed(START + 10 + HEARD_S + 0.1)) == ([], ["p"], [])
    made.note(beat("q", "both"), late)
    assert made.missed(late) == []
    assert roles("both", beat("p", "prefill")).missed(late) == []
    made = roles("decode", beat("p", "prefill"))
    made.note_reconnected(NOW)
    assert made.missed(late) == [], "it may not be back yet"


def test_a_prefill_worker_keeps_its_requests_once_the_last_decode_worker_has_ended() -> None:
    made = roles("prefill", beat("d", "decode"), beat("foreign", "decode", maker="other"), beat("p", "prefill"))
    late = START + 10 + MISSED_S + 0.1
    assert (made.missed(NOW), made.missed(late), made.hands_over(late)) == ([], ["d"], True)
    made.note_ended("d", late)
    assert not made.hands_over(late)
    made.note(beat("e", "both", takes=EVERYTHING), late)
    assert (made.missed(late), made.hands_over(late)) == ([], True)


def test_a_decode_worker_does_it_all_once_the_prefill_worker_has_ended() -> None:
    made = roles("decode", beat("p", "prefill"))
    made.note_ended("p", START + 9)
    assert made.takes(NOW) == ("ready",), "a successor was heard since"
    made.note_ended("p", NOW)
    assert made.takes(NOW) == EVERYTHING


def test_a_decode_worker_that_has_just_started_has_not_heard_the_others_yet() -> None:
    made = roles("decode")
    assert made.takes(START + 0.1) == ("ready",)
    assert made.takes(START + HEARD_S + 0.1) == EVERYTHING


def test_a_worker_for_both_takes_what_a_dead_prefill_worker_has_left() -> None:
    made = roles("both", beat("p", "prefill"))
    assert made.takes(START + 10 + READY_MEMORY_S - 1) == EVERYTHING
    assert made.takes(START + 10 + READY_MEMORY_S + 1) == PROMPT_QUEUES


@pytest.mark.parametrize(
    ("role", "others", "expected"),
    [
        ("prefill", [beat("d", "decode")], True),
        ("prefill", [beat("d", "both", takes=EVERYTHING)], True),
        ("prefill", [beat("d", "both")], False),
        ("prefill", [beat("d", None)], False),
        ("prefill", [beat("d", "decode", maker="other")], False),
        ("prefill", [beat("d", "decode", draining=True)], False),
        ("prefill", [beat("own", "decode")], False),
        ("prefill", [], False),
        ("both", [beat("d", "decode")], False),
        ("decode", [beat("d", "decode")], False),
    ],
)
def test_requests_are_handed_over_where_another_worker_can_use_the_kv(
    role: Role, others: list[PeerBeat], expected: bool
) -> None:
    assert roles(role, *others).hands_over(NOW) is expected


@pytest.mark.parametrize(
    ("role", "others", "expected"),
    [
        ("decode", ["prefill"], PROMPT_QUEUES),
        ("decode", ["decode"], ()),
        ("prefill", ["decode"], ("ready",)),
        ("prefill", ["prefill"], ()),
        ("both", ["prefill", "decode"], ()),
    ],
)
def test_what_is_left_to_others_and_taken_by_none_is_taken_here(
    role: Role, others: list[Role | None], expected: tuple[TakenQueue, ...]
) -> None:
    made = roles(role, *(beat(f"w{number}", other) for number, other in enumerate(others)))
    assert made.left(NOW) == expected
    for at in (NOW - LEFT_S, NOW):
        for queue in expected:
            made.left_queues.note(queue, Deliveries(1, 7), at)
    if expected:
        assert (made.takes(NOW), made.left(NOW), made.hands_over(NOW)) == (EVERYTHING, (), False)


def test_nothing_is_handed_over_while_the_weights_are_not_known() -> None:
    made = roles("prefill", beat("d", "decode", maker=""))
    made.maker = ""
    assert not made.hands_over(NOW)


def test_kv_is_fetched_where_a_worker_says_that_it_is_and_nowhere_else() -> None:
    made = roles("decode", beat("p", "prefill"), beat("q", "prefill", maker="other"), beat("old", None))
    assert made.address("p", NOW) == "127.0.0.1:7"
    assert [made.address(name, NOW) for name in ("q", "old", "nobody")] == [None, None, None]
    assert made.address("p", START + 10 + HEARD_S + 0.1) is None
    made.note(beat("p", "prefill", draining=True), NOW)
    assert made.address("p", NOW) == "127.0.0.1:7", "it waits with its end until what it keeps is fetched"
    made.maker = ""
    made.note(beat("p", "prefill", maker=""), NOW)
    assert made.address("p", NOW) is None, "neither says what it computes"
    assert roles("decode", beat("own", "prefill")).takes(NOW) == EVERYTHING, "what it says itself"


def test_a_decode_worker_claims_what_leaves_few_tokens_to_compute() -> None:
    assert roles("both").most_claimed == roles("prefill").most_claimed == math.inf
    assert roles("decode").most_claimed == 128


def test_who_makes_names_up_does_not_fill_the_memory() -> None:
    made = roles("decode", *(beat(f"w{number}", "prefill") for number in range(MAX_PEERS + 5)))
    assert len(made._peers) == MAX_PEERS
    made.note(beat(f"w{MAX_PEERS - 1}", "prefill"), NOW)
    assert len(made._peers) == MAX_PEERS, "who is known pushes nobody out"
