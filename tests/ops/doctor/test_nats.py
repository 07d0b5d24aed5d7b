"""Findings about NATS, with a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.doctor.finding import Level
from ops.doctor.nats import (
    NatsLogin,
    _described,
    clock_finding,
    cluster_finding,
    nats_findings,
)
from shared.disaggregation import RoleNews
from shared.hosted_models import HostBeat, HostedModel
from shared.messages import encode
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import worker_subject
from shared.worker_metrics import RankReading, WorkerMetrics
from tests.gateway.fleet.test_fleet import BEAT
from tests.ops.nats.secured import PASSWORDS, secured_server
from tests.servers import NatsServer


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with secured_server(tmp_path_factory.mktemp("secured")) as server:
        yield server


@pytest.mark.parametrize(
    "role", [pytest.param("gateway", marks=pytest.mark.slow), "worker", pytest.param("admin", marks=pytest.mark.slow)]
)
async def test_rights_of_each_role_are_tried(secured: NatsServer, role: str) -> None:
    login = NatsLogin(secured.url, role, role, PASSWORDS[role])  # type: ignore[arg-type]
    assert [one for one in await nats_findings(login) if one.level is Level.PROBLEM] == []
    other = "worker" if role == "gateway" else "gateway"
    found = await nats_findings(dataclasses.replace(login, role=other))  # type: ignore[arg-type]
    (refused,) = [one for one in found if one.level is Level.PROBLEM]
    assert refused.topic == "nats rights"
    assert f"the user `{other}`" in refused.text
    assert refused.remedy == ""


# What each role publishes to, and subscribes to.
NEEDED = {
    "worker": ({"hr.tok.?", "hr.worker.m.?"}, {"hr.worker.m.?", "hr.cancel.m", "hr.probe.?", "hr.tokenizer.m"}),
    "gateway": ({"hr.cancel.m", "hr.probe.?", "hr.gateway.?"}, {"hr.tok.?", "hr.worker.m.?"}),
    "admin": ({"$js.api.info"}, {"hr.worker.m.?"}),
}


@pytest.mark.parametrize("role", NEEDED)
async def test_every_right_that_lacks_is_named(role: str, tmp_path: Path) -> None:
    may = f'publish: "$JS.API.STREAM.INFO.*", subscribe: "_INBOX_{role}.>"'
    user = f"{{ user: u, password: p, permissions: {{ {may} }} }}"
    (tmp_path / "server.conf").write_text(f"authorization {{ users: [{user}] }}\n")
    with NatsServer(tmp_path / "nats", ("-c", str(tmp_path / "server.conf"))).running() as server:
        found = await nats_findings(NatsLogin(server.url, role, "u", "p", model="m"))  # type: ignore[arg-type]
    (refused,) = [one for one in found if one.level is Level.PROBLEM]
    assert refused.topic == "nats rights"
    assert f"`{role}`" in refused.remedy
    told = re.sub(r"doctor-\w+", "?", refused.text)
    assert told.startswith("refused: ")
    named = [set(re.findall(f'{what} to "(.*?)"', told)) for what in ("publish", "subscription")]
    assert tuple(named) == NEEDED[role]


async def test_wrong_password_is_a_problem_without_the_password(secured: NatsServer) -> None:
    (finding,) = await nats_findings(NatsLogin(secured.url, "worker", "worker", "not-this"))
    assert finding.level is Level.PROBLEM
    assert "refuses the user or password" in finding.text
    assert "not-this" not in finding.text


@pytest.mark.parametrize(("skew", "level"), [(0.01, Level.FINE), (1.0, Level.WARNING), (-60.0, Level.PROBLEM)])
def test_clocks_that_are_apart_are_told(skew: float, level: Level) -> None:
    finding = clock_finding("2026-01-02T03:04:05.123456789Z", 1767323045.123456789 + skew)
    assert finding is not None
    assert (finding.level, finding.text.split()[2]) == (level, "ahead" if skew > 0 else "behind")
    assert clock_finding("", 0.0) is None


@pytest.mark.parametrize(
    ("cluster", "level", "told"),
    [
        ({}, Level.FINE, "5 wait"),
        ({"leader": "a"}, Level.FINE, "5 wait"),
        (
            {"leader": "a", "replicas": [{"name": "b"}, {"name": "c"}]},
            Level.FINE,
            "5 wait; kept by 3 servers, led by a",
        ),
        ({"replicas": [{"name": "b"}, {"name": "c"}]}, Level.WARNING, "kept by 3 servers, none of which leads"),
        ({"leader": "a", "replicas": [{"name": "b", "offline": True}]}, Level.WARNING, "led by a; away: b"),
    ],
)
def test_who_keeps_the_queue_is_told_of_a_cluster(cluster: dict[str, Any], level: Level, told: str) -> None:
    found = cluster_finding(cluster, "5 wait")
    assert (found.level, told in found.text) == (level, True)


async def test_every_worker_that_is_heard_is_described(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    login = NatsLogin(server.url, "admin")
    queue, workers = (await nats_findings(login))[-2:]
    assert (queue.topic, queue.level) == ("queue", Level.WARNING)
    assert "headrace setup" in queue.remedy
    assert (workers.level, workers.text) == (Level.WARNING, "none is heard")
    nats = await connect(server.url, role="worker", name="w")
    await ensure_streams(nats.jetstream(), StreamLimits())

    ending: dict[str, Any] = {"draining": True, "is_ending": True}
    cordoned: dict[str, Any] = {"draining": True, "roles": RoleNews(role="decode")}

    async def beat() -> None:
        while True:
            for name, model, more in (("a", "m", {}), ("b", "other", ending), ("c", "other", cordoned)):
                told = {"revision": "r", "running": 2, "free_blocks": 3, "total_blocks": 7, **more}
                beat = msgspec.structs.replace(BEAT, worker=name, model=model, **told)
                await nats.publish(worker_subject(model, name), encode(beat))
            await nats.publish(worker_subject("m", "junk"), b"\xc1")
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    served = "(revision r), 2 running, 3 of 7 blocks free"
    found = await nats_findings(login)
    assert [(each.topic, each.level) for each in found[-2:]] == [("clock", Level.FINE), ("workers", Level.FINE)]
    assert found[-3].text == "0 interactive requests wait, 0 bytes"
    assert sorted(found[-1].text.split("; ")) == [
        f"a serves m {served}",
        f"b serves other {served}, draining",
        f"c serves other {served}, role decode, cordoned",
    ]
    # Of the model that the login is for.
    assert (await nats_findings(dataclasses.replace(login, model="m")))[-1].text == f"a serves m {served}"
    beating.cancel()
    await nats.close()


@pytest.mark.parametrize(
    ("model", "level", "text", "remedy"),
    [
        ({"state": "awake"}, Level.FINE, "h: 1 awake", ""),
        (
            {"state": "awake", "num_ready": 2, "num_withheld": 1},
            Level.FINE,
            "h: 1 awake; m: 1 of 2 workers cordoned",
            "",
        ),
        ({"state": "no_room", "on_demand": True}, Level.FINE, "h: 1 no_room", ""),
        ({"state": "no_room"}, Level.WARNING, "h: 1 no_room; m: no room", "HEADRACE_HOST_MEMORY_BYTES"),
        ({"state": "failed", "error": "bad"}, Level.WARNING, "h: 1 failed; m: bad", "`headrace model unload m`"),
    ],
)
async def test_models_of_hosts_that_cannot_be_served_are_told(
    model: dict[str, Any], level: Level, text: str, remedy: str, secured: NatsServer
) -> None:
    host = await connect(secured.url, role="worker", name="host", user="worker", password=PASSWORDS["worker"])
    found = HostedModel(**{"name": "m", "path": "/m", "on_demand": False, **model})

    async def beat() -> None:
        while True:
            await host.publish("hr.host.junk", b"\xc1")
            await host.publish("hr.host.h", encode(HostBeat(host="h", models=(found,))))
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    findings = await nats_findings(NatsLogin(secured.url, "admin", "admin", PASSWORDS["admin"]))
    (told,) = [each for each in findings if each.topic == "models"]
    assert (told.level, told.text, remedy in told.remedy) == (level, text, True)
    beating.cancel()
    await host.close()


def test_worker_of_several_ranks_is_described_with_those_that_are_missing() -> None:
    def text(*are_alive: bool) -> str:
        ranks = tuple(RankReading(rank, is_alive, 7, 0.0, 1) for rank, is_alive in enumerate(are_alive))
        return _described(msgspec.structs.replace(BEAT, metrics=WorkerMetrics(ranks=ranks)))

    assert text().endswith("blocks free")
    assert text(True, True).endswith("blocks free, 2 ranks")
    assert text(True, False, True).endswith(", 3 ranks of which 1 is missing")
    assert text(True, False, False).endswith(", 3 ranks of which 1, 2 are missing")
