"""Gateways follow names of adapters in a real NATS: changes of others, swaps, and a stream that was made anew."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from gateway.api.adapter_orders import AdapterOrders
from gateway.dispatch.dispatcher import Dispatcher
from gateway.fleet.adapter_names import AdapterNameFollower, FoundAdapter, NamedAdapters
from shared.adapter_calls import AdapterReply
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterContent
from shared.features import ADAPTER_STORE
from shared.messages import encode
from shared.nats_connection import connect
from shared.streams import ADAPTERS_STREAM, StreamLimits, ensure_streams
from shared.subjects import adapter_subject
from shared.task_supervisor import TaskSupervisor
from tests.gateway.fleet.test_fleet import BEAT
from tests.servers import NatsServer
from tests.waiting import until

ONE, OTHER = AdapterContent("1" * 64, 8, 4), AdapterContent("2" * 64, 9, 2)


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
        await names.put("a", None, "m", ONE)
        following = await follower.start(tasks)
        assert _meanings(named) == {"a": ONE}
        await names.put("a", None, "m", OTHER)
        await names.put("b", "acme", "m", ONE)
        await until(lambda: _meanings(named) == {"a": OTHER, "b": ONE})
        await names.put("a", None, "-", None)
        await until(lambda: _meanings(named) == {"b": ONE})
        assert named.was_removed("a", "acme")

        await js.delete_stream(ADAPTERS_STREAM)
        await ensure_streams(js, StreamLimits())
        await names.put("c", None, "m", ONE)
        await until(lambda: _meanings(named) == {"c": ONE})
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
