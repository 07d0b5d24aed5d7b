"""What becomes of a model whose workers end by themselves, and when one serves that has no room yet."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import nats
import pytest
from msgspec.structs import replace

from ops.stack.config import HostSettings
from ops.stack.hosting.model_state import (
    MAX_FAILURES,
    RETRY_FAILED_S,
    UNKNOWN_ROOM_S,
    Demand,
    KnownModel,
    Waiting,
    is_ahead,
    told_of,
)
from ops.stack.hosting.reconcile import Activity, SeenWorker
from ops.stack.hosting.wishes import Wish
from ops.stack.hosting.worker_process import DRAIN_S
from shared.config import resolve
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import encode_name, request_subject
from tests.gateway.fleet.test_fleet import BEAT


def test_failed_starts_are_repeated_with_growing_pauses_and_bad_settings_are_not() -> None:
    model = KnownModel(Activity(asked=True))
    pauses = []
    for now in range(MAX_FAILURES):
        assert model.activity.asked
        has_failed = model.note_failure("killed", float(now), was_well=False, is_final=False)
        assert has_failed == (now == MAX_FAILURES - 1)
        pauses.append(model.activity.may_start_at - now)
    assert pauses == [1.0, 2.0, RETRY_FAILED_S]
    assert not model.activity.asked
    # After it has served for a while, the next failure is a first one.
    assert not model.note_failure("killed", 100.0, was_well=True, is_final=False)
    assert model.activity.may_start_at == 101.0
    model = KnownModel(Activity(asked=True))
    assert model.note_failure("no tokenizer", 5.0, was_well=False, is_final=True)
    assert (model.activity.may_start_at, model.activity.asked, model.error) == (
        5.0 + RETRY_FAILED_S,
        False,
        "no tokenizer",
    )


def test_workers_that_take_no_requests_are_told_apart() -> None:
    wish = Wish(name="m", path="/m")
    beats = (BEAT, replace(BEAT, draining=True), None)
    workers = [cast("Any", SimpleNamespace(wish=wish, phase="ready", beat=beat)) for beat in beats]
    told = told_of(wish, KnownModel(Activity()), workers, resolve(HostSettings, {}, {}), now=0.0)
    assert (told.state, told.num_ready, told.num_withheld) == ("awake", 3, 1)


@pytest.mark.parametrize(("begun_s", "left_s"), [(0.0, 10.0), (4.0, 6.0), (9.9, 1.0), (10.5, 1.0), (40.0, 30.0)])
def test_start_that_is_late_is_not_predicted_to_end_at_once(begun_s: float, left_s: float) -> None:
    wish = Wish(name="m", path="/m", on_demand=True, load_s=10.0)
    worker = cast("Any", SimpleNamespace(wish=wish, phase="loading", started_at=100.0 - begun_s, beat=None))
    told = told_of(wish, KnownModel(Activity()), [worker], resolve(HostSettings, {}, {}), now=100.0)
    assert (told.state, told.ready_in_s) == ("loading", left_s)


@pytest.mark.parametrize(
    ("other", "waits_since", "room_s"),
    [
        ({"ready_at": 0.0}, math.inf, 0.0),
        ({"ready_at": 95.0}, math.inf, 25.0),
        # A busy one has its turn, gives way to one that has waited as long, and takes its time to drain.
        ({"ready_at": 0.0, "busy": True}, math.inf, 30.0 + DRAIN_S),
        ({"ready_at": 0.0, "busy": True}, 90.0, 20.0 + DRAIN_S),
        ({"ready_at": 95.0, "busy": True}, 90.0, 25.0 + DRAIN_S),
        ({"ready_at": 0.0, "busy": True}, 10.0, DRAIN_S),
        ({"ready_at": 0.0, "busy": True, "only_batch": True}, 99.0, DRAIN_S),
        ({"on_demand": False}, math.inf, UNKNOWN_ROOM_S),
    ],
)
def test_model_without_room_tells_the_longest_time_until_another_has_given_way(
    other: dict[str, Any], waits_since: float, room_s: float
) -> None:
    settings = resolve(HostSettings, {"host_memory_bytes": 10, "min_awake_s": 30.0}, {})
    wish = Wish(name="m", path="/m", on_demand=True, need_bytes=6, load_s=2.0)
    runs = Wish(name="other", path="/o", on_demand=other.pop("on_demand", True), need_bytes=6)
    seen = SeenWorker("w", "other", 0, 6, "ready", **other)
    worker = SimpleNamespace(wish=runs, phase="ready", seen=lambda: seen)
    model = KnownModel(Activity(waiting=1, waits_since=waits_since), has_room=False)
    told = told_of(wish, model, [cast("Any", worker)], settings, now=100.0)
    assert (told.state, told.ready_in_s) == ("no_room", 2.0 + room_s)


@pytest.mark.parametrize(("memory_bytes", "expected_s"), [(10, 2.0 + 25.0 + 3.0 + 30.0 + DRAIN_S), (12, 2.0 + 25.0)])
def test_models_that_wait_longer_have_their_turns_first_unless_all_fit(memory_bytes: int, expected_s: float) -> None:
    settings = resolve(HostSettings, {"host_memory_bytes": memory_bytes, "min_awake_s": 30.0}, {})
    wish, ahead = (
        Wish(name=name, path="/m", on_demand=True, need_bytes=6, load_s=s) for name, s in (("m", 2.0), ("a", 3.0))
    )
    runs = Wish(name="other", path="/o", on_demand=True, need_bytes=12)
    seen = SeenWorker("w", "other", 0, 12, "ready", ready_at=95.0)
    worker = cast("Any", SimpleNamespace(wish=runs, phase="ready", seen=lambda: seen))
    told = told_of(wish, KnownModel(Activity(waiting=1, waits_since=99.0)), [worker], settings, 100.0, [ahead])
    assert told.ready_in_s == expected_s


def test_who_waits_longer_is_ahead_and_people_go_before_batch_jobs() -> None:
    asleep, waits = KnownModel(Activity()), KnownModel(Activity(waiting=1, waits_since=50.0))
    assert is_ahead(waits, asleep, 100.0)
    assert not is_ahead(asleep, waits, 100.0)
    assert not is_ahead(KnownModel(Activity(waiting=1, waits_since=60.0)), waits, 100.0)
    assert not is_ahead(KnownModel(Activity(waiting=2, batch=2, waits_since=10.0)), waits, 100.0)
    assert not is_ahead(KnownModel(Activity(waiting=1, waits_since=10.0, may_start_at=120.0)), waits, 100.0)


def test_host_without_least_time_awake_tells_no_turn_that_has_to_end() -> None:
    settings = resolve(HostSettings, {"host_memory_bytes": 10, "min_awake_s": 0.0}, {})
    wish, runs = (Wish(name=name, path="/m", on_demand=True, need_bytes=6, load_s=2.0) for name in ("m", "other"))
    for is_busy, room_s in ((False, 0.0), (True, DRAIN_S)):
        seen = SeenWorker("w", "other", 0, 6, "ready", ready_at=100.0, busy=is_busy)
        worker = cast("Any", SimpleNamespace(wish=runs, phase="ready", seen=lambda seen=seen: seen))
        told = told_of(wish, KnownModel(Activity(waiting=1, waits_since=100.0)), [worker], settings, 100.0)
        assert told.ready_in_s == 2.0 + room_s


async def test_job_that_was_published_past_the_gateways_counts_for_its_model_alone(nats_url: str) -> None:
    publisher = await nats.connect(nats_url)
    host: DirectClient = await connect(nats_url, role="worker", name="host")
    try:
        js = publisher.jetstream()
        await ensure_streams(js, StreamLimits(), ["default", "woken-by"])
        sleeping, other = "org/sleeping by demand", "other by demand"
        subject = f"hr.req.{encode_name(sleeping)}"
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(), other: Waiting()}
        await js.publish(f"{subject}.batch.woken-by", b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(1, 1), other: Waiting()}
        await js.publish(f"{subject}.interactive", b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(2, 1), other: Waiting()}
        await js.publish(request_subject(sleeping, "ready", ""), b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(3, 1), other: Waiting()}
    finally:
        await publisher.close()
        await host.close()
