"""What the name of an adapter means, by what operators say and by the heartbeats of its model's workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from gateway.admission.caller import Caller
from gateway.api.adapter_orders import AdapterOrders
from gateway.api.model_fit import with_adapter
from gateway.api.sequences import wire_requests
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.fleet.adapter_names import LEASE_S, AdapterNameFollower, FoundAdapter, NamedAdapters
from gateway.generation import Generation, Prompt
from shared.adapter_calls import AdapterBeat, AdapterReply, NamesRead
from shared.adapter_files import AdapterContent
from shared.adapter_names import AdapterNames, NamedAdapter
from shared.direct_client import DirectClient
from shared.features import ADAPTER_STORE, FEATURES
from shared.hosted_models import HostBeat, HostedModel
from shared.messages import GatewayHeartbeat, Heartbeat, decode_request, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.streams import ADAPTERS_STREAM, StreamLimits, ensure_streams
from shared.subjects import adapter_subject, probe_subject
from shared.task_supervisor import TaskSupervisor
from tests.gateway.fleet.test_fleet import BEAT, Watched
from tests.servers import NatsServer
from tests.waiting import until

ONE, OTHER = "1" * 64, "2" * 64


def _watched(*workers: tuple[AdapterBeat, ...]) -> Watched:
    watched = Watched()
    watched.fleet.sweep(watched.now)
    for number, adapters in enumerate(workers):
        watched.hear(worker=f"w{number}", adapters=adapters)
    return watched


def _asked(model: str) -> Generation:
    return Generation("completion", model, (Prompt(1, text="a"),), 1, Sampling(), deterministic=True)


def test_name_means_what_all_workers_have() -> None:
    fleet = _watched((AdapterBeat("a", ONE), AdapterBeat("b", OTHER)), (AdapterBeat("a", ONE),)).fleet
    assert fleet.adapters() == {"a": "m"}
    assert fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert fleet.find_adapter("c") is None
    # The rollout of `b` is not done.
    assert fleet.find_adapter("b") == FoundAdapter("m", None)


def test_name_means_nothing_while_workers_differ() -> None:
    watched = _watched((AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),))
    assert watched.fleet.adapters() == {}
    with pytest.raises(ApiError) as refused:
        with_adapter(_asked("a"), watched.fleet)
    assert (refused.value.status, refused.value.code) == (503, "no_worker")
    watched.hear(worker="w0", adapters=(AdapterBeat("a", OTHER),))
    assert with_adapter(_asked("a"), watched.fleet).adapter == OTHER


def test_worker_of_the_version_before_gets_no_request_with_an_adapter() -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)
    watched.hear(worker="old", features=("resumed",))
    with pytest.raises(ApiError, match="can serve the adapter `a` at the moment"):
        with_adapter(_asked("a"), watched.fleet)


def test_draining_workers_do_not_count() -> None:
    watched = _watched((AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),))
    watched.hear(worker="w0", draining=True, adapters=(AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", OTHER)


def test_name_of_a_model_is_the_model() -> None:
    watched = _watched((AdapterBeat("m", ONE), AdapterBeat("other", ONE)))
    watched.hear(worker="w9", model="other")
    assert watched.fleet.adapters() == {}
    assert with_adapter(_asked("other"), watched.fleet).served_model == "other"


def test_name_stays_with_the_model_that_had_it_first() -> None:
    one, other = (AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),)
    watched = _watched(one)
    for model in ("blue", "z"):
        watched.hear(worker=f"liar-{model}", model=model, adapters=other)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert watched.fleet.adapters() == {"a": "m"}

    # Its only worker is away for a while: nobody else gets the name.
    watched.run(30, worker="liar-blue", model="blue", running=0, adapters=other)
    assert watched.fleet.models() == ["blue"]
    assert watched.fleet.find_adapter("a") is None
    watched.hear(worker="w0", adapters=one)
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)


def test_name_that_its_model_gives_up_is_another_models() -> None:
    one, other = (AdapterBeat("a", ONE),), (AdapterBeat("a", OTHER),)
    watched = _watched(one)
    for _ in range(20):
        watched.hear(worker="next", model="blue", adapters=other)
        watched.run(0.1, worker="w0")
    assert watched.fleet.find_adapter("a") == FoundAdapter("blue", OTHER)


def test_second_process_of_a_workers_name_claims_no_name() -> None:
    watched = _watched(())
    watched.hear(worker="w0", model="blue", started=9.0, adapters=(AdapterBeat("a", OTHER),))
    watched.hear(worker="w1", adapters=(AdapterBeat("a", ONE),))
    watched.hear(worker="w0", adapters=(AdapterBeat("a", ONE),))
    assert watched.fleet.find_adapter("a") == FoundAdapter("m", ONE)


def test_generation_is_answered_by_its_model_with_the_content_of_this_moment() -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    generation = with_adapter(_asked("a"), watched.fleet)
    watched.hear(worker="w0", adapters=(AdapterBeat("a", OTHER),))
    assert (generation.model, generation.served_model, generation.adapter) == ("a", "m", ONE)


def test_heartbeats_of_the_version_before_have_none() -> None:
    fields = msgspec.to_builtins(BEAT)
    fields.pop("adapters", None)
    assert msgspec.convert(fields, Heartbeat).adapters == ()


def test_request_without_an_adapter_has_no_such_field() -> None:
    (plain,) = wire_requests(_asked("m"), Caller("", "t", [], b""), "hr.tok.g", 30.0)
    assert b"adapter" not in encode(plain)
    adapted = msgspec.structs.replace(_asked("a"), base="m", adapter=ONE)
    (request,) = wire_requests(adapted, Caller("", "t", [], b""), "hr.tok.g", 30.0)
    assert decode_request(encode(request)).adapter == ONE
    assert request.model == "m"


def test_gateway_that_never_read_names_uses_none() -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    watched.fleet.named_adapters.read_at = None
    with pytest.raises(ApiError, match="cannot read what names of adapters mean"):
        with_adapter(_asked("a"), watched.fleet)


async def test_gateway_that_never_read_names_tells_so() -> None:
    nats, sent = Mock(num_reads=0, new_inbox=lambda: "_INBOX.a.b"), list[bytes]()

    async def publish(subject: str, payload: bytes) -> None:
        sent.append(payload)

    nats.publish = publish
    await Dispatcher(nats, "g", tasks=TaskSupervisor()).send_heartbeat()
    assert msgspec.msgpack.decode(sent[0], type=GatewayHeartbeat).adapter_names == NamesRead(0.0, 0)


@pytest.mark.parametrize("is_gone", [False, True], ids=["never-made", "gone"])
async def test_names_of_workers_are_used_while_there_is_no_stream_of_others(is_gone: bool) -> None:
    watched = _watched((AdapterBeat("a", ONE),))
    named = watched.fleet.named_adapters
    named.read_at = time.monotonic() - LEASE_S if is_gone else None
    nats = Mock(spec=DirectClient)
    nats.jetstream.return_value.stream_info = AsyncMock(side_effect=NotFoundError)
    await AdapterNameFollower(nats, named, AsyncMock()).read()
    assert with_adapter(_asked("a"), watched.fleet).adapter == ONE


def _named(tenant: str | None, digest: str | None) -> NamedAdapter:
    return NamedAdapter("a", tenant, "m", None if digest is None else AdapterContent(digest, 8))


def test_tenants_name_goes_before_a_shared_one_and_nobody_else_has_it() -> None:
    watched = _watched(())
    watched.hear(worker="w0", features=(*FEATURES, ADAPTER_STORE))
    fleet = watched.fleet
    fleet.named_adapters.note(_named("acme", ONE))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", ONE)
    assert (fleet.find_adapter("a", "other"), fleet.find_adapter("a"), fleet.adapters("other")) == (None, None, {})
    fleet.named_adapters.note(_named(None, OTHER))
    found = [fleet.find_adapter("a", tenant) for tenant in ("acme", "other")]
    assert found == [FoundAdapter("m", ONE), FoundAdapter("m", OTHER)]
    fleet.named_adapters.note(_named("acme", None))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", OTHER)
    assert not fleet.named_adapters.was_removed("a", "acme")
    fleet.named_adapters.note(_named(None, None))
    assert (fleet.adapters("acme"), fleet.named_adapters.was_removed("a", "acme")) == ({}, True)


def test_what_an_operator_says_goes_before_what_workers_call_their_own() -> None:
    watched, features = _watched(()), (*FEATURES, ADAPTER_STORE)
    fleet = watched.fleet
    watched.hear(worker="w0", features=features, adapters=(AdapterBeat("a", ONE),))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", ONE)
    fleet.named_adapters.note(_named(None, OTHER))
    assert fleet.find_adapter("a", "acme") == FoundAdapter("m", OTHER)
    fleet.named_adapters.note(_named("acme", ONE))
    assert [fleet.find_adapter("a", tenant) for tenant in ("acme", None)] == [
        FoundAdapter("m", ONE),
        FoundAdapter("m", OTHER),
    ]
    # A worker that starts again does not bring back what was removed.
    fleet.named_adapters.note(_named("acme", None))
    fleet.named_adapters.note(_named(None, None))
    assert (fleet.find_adapter("a", "acme"), fleet.adapters("acme")) == (None, {})


@pytest.mark.parametrize("digest", [ONE, None])
def test_gateway_that_cannot_read_names_uses_none(digest: str | None) -> None:
    watched = _watched(())
    watched.hear(worker="w0", features=(*FEATURES, ADAPTER_STORE), adapters=(AdapterBeat("a", OTHER),))
    named = watched.fleet.named_adapters
    if digest is not None:
        named.note(_named(None, digest))
    named.read_at = time.monotonic()
    assert with_adapter(_asked("a"), watched.fleet).adapter == (digest or OTHER)
    named.read_at -= LEASE_S
    with pytest.raises(ApiError, match="cannot read what names of adapters mean"):
        with_adapter(_asked("a"), watched.fleet)


def test_adapter_of_a_model_that_sleeps_waits_for_it() -> None:
    watched = Watched()
    fleet, last = watched.fleet, msgspec.structs.replace(BEAT, features=(*FEATURES, ADAPTER_STORE))
    asleep = HostedModel(name="m", path="/m", state="asleep", on_demand=True, last=last)
    fleet.note_host_beat(HostBeat(host="h", models=(asleep,)), watched.now)
    fleet.named_adapters.note(_named(None, ONE))
    assert fleet.find_adapter("a") == FoundAdapter("m", ONE)
    assert with_adapter(_asked("a"), fleet).served_model == "m"
    # Its workers have no places.
    plain = msgspec.structs.replace(asleep, last=BEAT)
    fleet.note_host_beat(HostBeat(host="h", models=(plain,)), watched.now)
    assert fleet.find_adapter("a") == FoundAdapter("m", None)


CONTENT, OTHER_CONTENT = AdapterContent("1" * 64, 8, 4), AdapterContent("2" * 64, 9, 2)


def _meanings(named: NamedAdapters) -> dict[str, AdapterContent | None]:
    return {each.name: each.content for each in named.all()}


async def test_gateway_follows_what_others_change(tmp_path: Path) -> None:
    with NatsServer(tmp_path).running() as server:
        other, nats = [await connect(server.url, role="gateway", name=name) for name in ("other", "own")]
        js, named, tasks = other.jetstream(), NamedAdapters(), TaskSupervisor()
        names = AdapterNames(js)
        told: list[object] = []

        async def tell() -> None:
            told.append(named.read)

        follower = AdapterNameFollower(nats, named, tell)
        # NATS was set up by the version before: there are no names.
        await follower.read()
        await ensure_streams(js, StreamLimits())
        await names.put("a", None, "m", CONTENT)
        following = await follower.start(tasks)
        assert _meanings(named) == {"a": CONTENT}
        await names.put("a", None, "m", OTHER_CONTENT)
        await names.put("b", "acme", "m", CONTENT)
        await until(lambda: _meanings(named) == {"a": OTHER_CONTENT, "b": CONTENT})
        await names.put("a", None, "-", None)
        await until(lambda: _meanings(named) == {"b": CONTENT})
        assert named.was_removed("a", "acme")

        await js.delete_stream(ADAPTERS_STREAM)
        await ensure_streams(js, StreamLimits())
        await names.put("c", None, "m", CONTENT)
        await until(lambda: _meanings(named) == {"c": CONTENT})
        assert not named.was_removed("a", "acme")
        # Other gateways hear each step of it, and nothing where there was none.
        assert told[-1] == named.read
        assert len(set(told)) == len(told) >= 3
        await tasks.stop(following)
        for connection in (other, nats):
            await connection.close()


class _SlowFollower(AdapterNameFollower):
    """Follows while its gateway has something else to do."""

    async def read(self) -> None:
        await asyncio.sleep(0.01)
        await super().read()


class _Store:
    """Has whatever an order names."""

    place = "the store"

    async def num_bytes(self, digest: str) -> int | None:
        return 8

    keep = num_bytes


async def test_swap_returns_when_no_gateway_means_the_content_before(tmp_path: Path) -> None:
    with NatsServer(tmp_path).running() as server:
        async with AsyncExitStack() as stack:
            dispatchers, orders = [], []
            worker = await connect(server.url, role="worker", name="w")
            stack.push_async_callback(worker.close)
            await ensure_streams(worker.jetstream(), StreamLimits())

            async def answer(message: Msg) -> None:
                await worker.publish(message.reply, encode(AdapterReply()))

            await worker.subscribe(adapter_subject("w"), cb=answer)
            # On a busy machine it is probed.
            await worker.subscribe(probe_subject("w"), cb=answer)
            for name, kind in (("gw-a", AdapterNameFollower), ("gw-b", _SlowFollower)):
                nats, tasks = await connect(server.url, role="gateway", name=name), TaskSupervisor()
                dispatcher = Dispatcher(nats, name, tasks=tasks)
                stack.push_async_callback(nats.close)
                await dispatcher.start()
                stack.push_async_callback(dispatcher.close)
                follower = kind(nats, dispatcher.fleet.named_adapters, dispatcher.send_heartbeat)
                stack.push_async_callback(tasks.stop, await follower.start(tasks))
                dispatchers.append(dispatcher)
                orders.append(AdapterOrders(nats, dispatcher.fleet, _Store(), follower.read))  # type: ignore[arg-type]
            fleets = [dispatcher.fleet for dispatcher in dispatchers]
            await until(lambda: all(fleet.gateways for fleet in fleets))
            for number in range(60):
                for fleet in fleets:
                    beat = msgspec.structs.replace(BEAT, worker="w", features=(ADAPTER_STORE,))
                    fleet.note_heartbeat(beat, asyncio.get_running_loop().time())
                digest = f"{number:064x}"
                await orders[0].load(msgspec.json.encode({"lora_name": "a", "lora_content": [digest, 8]}))
                assert [fleet.find_adapter("a") for fleet in fleets] == [FoundAdapter("m", digest)] * 2
            await orders[0].unload(b'{"lora_name": "a"}')
            assert [fleet.find_adapter("a") for fleet in fleets] == [None, None]
