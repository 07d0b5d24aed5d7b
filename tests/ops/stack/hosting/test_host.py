"""A host: whose orders it carries out, what becomes of workers that fail, and what it tells of all that.

What the server closes for good is made anew, and orders are heard again.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from nats.errors import ConnectionClosedError

from ops.stack.child import Child, ChildSpec, Exit
from ops.stack.config import DEMO_MODEL, HostSettings
from ops.stack.console import Console
from ops.stack.hosting import host as host_module
from ops.stack.hosting.host import Host
from ops.stack.hosting.worker_process import WorkerProcess
from ops.stack.plan import NatsAccess
from shared.errors import DependencyError
from shared.hosted_models import HOST_BEAT_INTERVAL_S, HostBeat, HostedModel, ModelOrder, ModelReply
from shared.messages import encode
from shared.nats_connection import connect
from shared.subjects import host_subject, model_order_subject
from tests.gateway.fleet.test_fleet import BEAT
from tests.servers import NatsServer
from tests.waiting import until


async def test_host_hears_orders_again_after_the_server_has_closed_its_connection_for_good(
    start_nats: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.stack.hosting.host.RETRY_S", 0.01)
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 10\n")
    url = start_nats("-c", str(config)).url
    parts = (HostSettings(host_name="h"), NatsAccess(url, None, None), {}, tmp_path, Console())
    host = Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log")
    await host.start()
    running, first = asyncio.create_task(host.run()), host._nats
    assert first is not None
    for number in range(11):
        await first.subscribe(f"a.{number}")
    await until(lambda: host._nats is not first)
    gateway = await connect(url, role="gateway", name="g")
    order = encode(ModelOrder(action="unload", name="nothere"))
    answer = await gateway.request(model_order_subject("h"), order, timeout=20)
    assert "nothere" in (msgspec.msgpack.decode(answer.data, type=ModelReply).error or "")
    running.cancel()
    await gateway.close()
    await host.stop(1)


async def test_host_pauses_between_its_tries_to_reach_nats_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "RETRY_S", 0.1)
    num_tries = 0

    async def fail() -> None:
        nonlocal num_tries
        num_tries += 1
        await asyncio.sleep(0)
        raise DependencyError("NATS is away")

    parts = (HostSettings(host_name="h"), NatsAccess("nats://127.0.0.1:1", None, None), {}, tmp_path, Console())
    host = Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log")
    monkeypatch.setattr(host, "_nats", Mock(is_closed=True))
    monkeypatch.setattr(host, "_connect", fail)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.run(), 0.35)
    assert 1 <= num_tries <= 3


async def test_connection_on_which_orders_cannot_be_heard_is_closed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = Mock(subscribe=AsyncMock(side_effect=ConnectionClosedError), close=AsyncMock())
    monkeypatch.setattr(host_module, "connect", AsyncMock(return_value=nats))
    parts = (HostSettings(host_name="h"), NatsAccess("nats://127.0.0.1:1", None, None), {}, tmp_path, Console())
    with pytest.raises(DependencyError, match="cannot be listened to"):
        await Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log").start()
    nats.close.assert_awaited_once()


class Unstarted(WorkerProcess):
    """A worker without a process, which is given its own number."""

    def start(self) -> None:
        self._child.pid = next(NUMBERS)

    def fail(self, status: int) -> None:
        self._ended(self._child, Exit(status, ("headrace: no tokenizer",)))


NUMBERS = itertools.count(1000)


@pytest.fixture
def make_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Host]:
    """Makes hosts on one state directory that are connected to nothing, and may load the demo model."""
    monkeypatch.setattr(host_module, "WorkerProcess", Unstarted)

    def make() -> Host:
        settings = HostSettings(host_name="h", models_dir=str(DEMO_MODEL.parent))
        parts = (settings, NatsAccess("nats://127.0.0.1:1", None, None), {}, tmp_path, Console(io.StringIO()))
        host = Host(*parts, hang_timeout_s=10, audit_file=tmp_path / "audit.log")
        host._nats = Mock(publish=AsyncMock(), close=AsyncMock())
        return host

    return make


@pytest.fixture
def host(make_host: Callable[[], Host]) -> Host:
    return make_host()


async def order(host: Host, action: str, reply: str = "_INBOX_gateway.x", **fields: Any) -> str | None:
    """Give an order about the model `m`, and return what the host answers: "unheard" for nothing."""
    told: list[bytes] = []
    data = encode(ModelOrder(action=cast("Any", action), name="m", **fields))
    message = Mock(data=data, reply=reply, respond=AsyncMock(side_effect=told.append))
    await host._on_order(message)
    return msgspec.msgpack.decode(told[0], type=ModelReply).error if told else "unheard"


def workers(host: Host) -> list[Unstarted]:
    host._reconcile({})
    return cast("list[Unstarted]", list(host._workers.values()))


async def beat(host: Host, worker: Unstarted, **fields: Any) -> None:
    heard = {"worker": worker.id, "pid": worker.pid, "running": 0, "waiting": 0, **fields}
    await host._on_heartbeat(Mock(data=encode(msgspec.structs.replace(BEAT, **heard))))


async def told(host: Host, *, at_once: bool = True) -> HostedModel | None:
    """Return what the host reports of the model `m` now; None if it reports nothing."""
    assert host._nats is not None
    publish = cast("AsyncMock", host._nats.publish)
    publish.reset_mock()
    await host._tell(at_once=at_once)
    if not publish.await_args_list:
        return None
    subject, data = publish.await_args_list[0].args
    assert subject == host_subject("h")
    return next(iter(msgspec.msgpack.decode(data, type=HostBeat).models), None)


async def test_orders_of_gateways_alone_are_carried_out_and_each_is_in_the_audit_log(
    host: Host, tmp_path: Path
) -> None:
    path = str(DEMO_MODEL)
    for reply in ("", "_INBOX_worker.x", "x._INBOX_gateway.x"):
        assert await order(host, "load", reply, path=path) == "unheard"
    assert workers(host) == []
    assert "is not loaded" in (await order(host, "sleep") or "")
    assert await order(host, "load", path=path) is None
    assert "is loaded already" in (await order(host, "load", path=path) or "")
    assert "always runs" in (await order(host, "sleep") or "")
    assert len(workers(host)) == 1
    assert await order(host, "wake") is None
    assert await order(host, "unload") is None
    await until(lambda: workers(host) == [])
    entries = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [(each["action"].removeprefix("model."), each["outcome"]) for each in entries] == [
        *(("sleep", "failed"), ("load", "done"), ("load", "failed"), ("sleep", "failed")),
        *(("wake", "done"), ("unload", "done")),
    ]


async def test_model_on_demand_is_loaded_once_sleeps_when_told_and_is_woken_for_a_client(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), on_demand=True) is None
    (worker,) = workers(host)
    state = await told(host)
    assert state is not None
    assert (state.state, state.wakes) == ("loading", 1)
    # Another machine's process may have this number, and another model this worker's name.
    await beat(host, worker, pid=1)
    await beat(host, worker, model="other")
    assert worker.phase == "loading"
    assert "is being loaded" in (await order(host, "sleep") or "")
    await beat(host, worker)
    assert worker.phase == "ready"
    assert await told(host, at_once=False) is not None, "its state is another one"
    assert await told(host, at_once=False) is None
    host._told_at -= HOST_BEAT_INTERVAL_S
    assert await told(host, at_once=False) is not None, "gateways hear from it all the time"
    await beat(host, worker, running=1)
    assert "has requests" in (await order(host, "sleep") or "")
    await beat(host, worker)
    assert await order(host, "sleep") is None
    assert await order(host, "wake", reply="") == "unheard"
    # It has not ended yet, so there is nothing to wake.
    await until(lambda: workers(host) == [])
    assert await order(host, "wake", reply="") == "unheard"
    assert len(workers(host)) == 1
    state = await told(host)
    assert state is not None
    assert (state.state, state.wakes) == ("loading", 2)


async def test_wake_of_a_model_that_is_awake_does_not_put_off_its_sleep(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), on_demand=True) is None
    (worker,) = workers(host)
    await beat(host, worker)
    activity = host._model("m").activity
    before = activity.active_at
    assert await order(host, "wake") is None
    assert (activity.active_at, activity.asked) == (before, False)
    activity.active_at -= 1000
    assert [each.phase for each in workers(host)] == ["stopping"]


async def test_wake_takes_back_an_order_to_sleep(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), on_demand=True) is None
    (worker,) = workers(host)
    await beat(host, worker)
    for action in ("sleep", "wake"):
        assert await order(host, action) is None
    assert [each.phase for each in workers(host)] == ["ready"]


async def test_worker_of_a_model_that_was_unloaded_is_none_of_what_is_loaded_at_once_under_its_name(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL)) is None
    (old,) = workers(host)
    assert await order(host, "unload") is None
    assert old.phase == "stopping"
    assert await order(host, "load", path=str(DEMO_MODEL)) is None
    (new,) = (each for each in workers(host) if each is not old)
    await beat(host, old)
    state = await told(host)
    assert state is not None
    assert (state.state, state.num_ready, state.load_s) == ("loading", 0, None)
    # It may have another revision only if it was replaced.
    assert not new.wish.is_replaced


async def test_replacement_that_fails_after_a_restart_of_the_host_is_undone(
    host: Host, make_host: Callable[[], Host]
) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), options={"max_num_seqs": "3"}) is None
    assert await order(host, "replace", path=str(DEMO_MODEL), options={"max_num_seqs": "4"}) is None
    again = make_host()
    (new,) = workers(again)
    assert new.wish.options == {"max_num_seqs": "4"}
    new.fail(2)
    (restored,) = workers(again)
    assert restored.wish.options == {"max_num_seqs": "3"}
    state = await told(again)
    assert state is not None
    assert "no tokenizer" in (state.replace_error or "")


async def test_replacement_that_fails_leaves_the_model_as_it_was(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), options={"max_num_seqs": "3"}) is None
    (old,) = workers(host)
    await beat(host, old)
    assert await order(host, "replace", path=str(DEMO_MODEL), options={"max_num_seqs": "4"}) is None
    (_, new) = workers(host)
    # That of the model before says nothing of the new one.
    old.fail(2)
    assert [each.wish.generation for each in workers(host)] == [1]
    new.fail(2)
    state = await told(host)
    assert state is not None
    assert "no tokenizer" in (state.error or "")
    (restored,) = workers(host)
    assert (restored.wish.generation, restored.wish.options) == (0, {"max_num_seqs": "3"})
    await beat(host, restored)
    state = await told(host)
    assert state is not None
    assert (state.state, state.num_ready, state.error) == ("awake", 1, None)


async def test_worker_of_the_old_content_that_comes_up_late_does_not_confirm_a_replacement(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), on_demand=True, options={"max_num_seqs": "3"}) is None
    (old,) = workers(host)
    assert await order(host, "replace", path=str(DEMO_MODEL), options={"max_num_seqs": "4"}) is None
    (_, new) = workers(host)
    await beat(host, old)
    new.fail(2)
    assert workers(host) == [old], "it goes on, and no other one is started"
    assert old.phase == "ready"
    state = await told(host)
    assert state is not None
    assert (state.state, state.num_ready) == ("awake", 1)
    assert "no tokenizer" in (state.replace_error or "")
    wish = host._wishes.known("m")
    assert (wish.generation, wish.options) == (0, {"max_num_seqs": "3"})


async def test_replacement_is_confirmed_by_its_own_worker(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL), on_demand=True) is None
    (old,) = workers(host)
    assert await order(host, "replace", path=str(DEMO_MODEL)) is None
    (_, new) = workers(host)
    await beat(host, old)
    assert host._model("m").activity.asked, "the new one has not served yet"
    await beat(host, new)
    assert not host._model("m").activity.asked
    new.fail(1)
    state = await told(host)
    assert state is not None
    assert (host._wishes.known("m").generation, state.replace_error) == (1, None)


async def test_undone_replacement_is_told_until_the_next_one_is_ordered(host: Host) -> None:
    assert await order(host, "load", path=str(DEMO_MODEL)) is None
    (old,) = workers(host)
    assert await order(host, "replace", path=str(DEMO_MODEL)) is None
    (_, new) = workers(host)
    new.fail(2)
    # The old one comes up after that: it serves, and still the replacement has failed.
    await beat(host, old)
    state = await told(host)
    assert state is not None
    assert (state.state, state.num_ready, state.error) == ("awake", 1, None)
    assert "no tokenizer" in (state.replace_error or "")
    assert await order(host, "replace", path=str(DEMO_MODEL)) is None
    state = await told(host)
    assert state is not None
    assert state.replace_error is None


async def test_models_of_a_start_are_told_by_name_with_as_many_workers_as_each_has(host: Host, tmp_path: Path) -> None:
    def child(number: int, model: str, name: str) -> Child:
        environ = {"HEADRACE_MODEL": model, "HEADRACE_SERVED_MODEL_NAME": name}
        spec = ChildSpec("worker", f"worker-{number}", ("true",), environ, 1.0)
        child = Child(spec, tmp_path, Console(), started=lambda _: None, ended=lambda _, __: False)
        child.pid = number
        return child

    children = [child(1, "/models/a", "m"), child(2, "/models/a", "m"), child(3, "/models/b", "")]
    host.adopt(children, 2.5, AsyncMock())
    assert [(each.name, each.path, each.workers, each.load_s) for each in host._wishes] == [
        ("m", "/models/a", 2, 2.5),
        ("b", "/models/b", 1, 2.5),
    ]
    assert host.pids == [], "others have started them"
    first = cast("Unstarted", host._workers["worker-1"])
    for worker in ("w1", "of-another-machine"):
        await host._on_heartbeat(Mock(data=encode(msgspec.structs.replace(BEAT, worker=worker, pid=1))))
    assert first.beat is not None
    assert first.beat.worker == "w1"
    first.stop()
    await asyncio.sleep(0)
    await host.stop(1)
    assert first._stopping is not None
    assert first._stopping.cancelling(), "whoever has started it ends it"
