"""A gateway follows names of adapters in a real NATS: changes of others, and a stream that was made anew."""

from __future__ import annotations

from pathlib import Path

from gateway.fleet.adapter_names import AdapterNameFollower, NamedAdapters
from shared.adapter_names import AdapterNames
from shared.adapter_store import AdapterContent
from shared.nats_connection import connect
from shared.streams import ADAPTERS_STREAM, StreamLimits, ensure_streams
from shared.task_supervisor import TaskSupervisor
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
        follower = AdapterNameFollower(nats, named)
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
        await tasks.stop(following)
        for connection in (other, nats):
            await connection.close()
