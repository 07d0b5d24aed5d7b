from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from nats.aio.client import Client

from ops.cli.dead_letter_box import DeadLetterBox, Selection
from ops.stack.ports import free_port
from shared.batch_streams import batch_stream, ensure_batch_stream
from shared.dead_letters import DeadAttempt, DeadLetter, publish_dead_letter
from shared.disaggregation import KvReady
from shared.kv_budget import EvictedBlocks
from shared.messages import BatchResult, FinishReason, Lane, Request, decode_request
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams, tenant_stream_config
from shared.subjects import result_subject
from tests.integration.system import System
from tests.ops.cli.command import headrace_here as headrace
from tests.servers import NatsServer

T = TypeVar("T")


@pytest.fixture
def server(start_nats: Callable[..., NatsServer]) -> Iterator[NatsServer]:
    server = start_nats()

    async def fill(client: Client) -> None:
        await ensure_streams(client.jetstream(), StreamLimits())
        letters = (("one", "acme", "interactive"), ("two", "acme", "batch"), ("two", "b", "batch"))
        for request_id, tenant, lane in letters:
            await publish_dead_letter(client, _letter(request_id, tenant, lane))  # type: ignore[arg-type]

    _with_nats(server, fill)
    return server


def _with_nats(server: NatsServer, action: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        client = await connect(server.url, role="admin", name="test")
        try:
            return await action(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _letter(request_id: str, tenant: str, lane: Lane) -> DeadLetter:
    request = Request(
        id=request_id,
        model="m",
        tenant=tenant,
        lane=lane,
        epoch=4,
        text="secret prompt",
        emitted=(1, 2),
        evicted=EvictedBlocks(16, (1,)),
        ready=KvReady(request_id, 3, "w9"),
        deadline=5.0,
        reply="hr.tok.g",
    )
    return DeadLetter(
        request=request,
        reason="worker_lost",
        error="worker w9 died\x1b[2J",
        quarantined_by="g1",
        quarantined=1_000_000_000.0,
        attempts=(DeadAttempt("w9", 3, 1.0, "died"),),
    )


def _dead(server: NatsServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return headrace("dead", "--nats-url", server.url, *arguments)


def _listed(server: NatsServer, *arguments: str) -> list[tuple[str, str, str]]:
    done = _dead(server, "list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(entry["id"], entry["tenant"], entry["lane"]) for entry in found]


def test_list_shows_what_happened_but_no_prompt_and_no_control_characters(server: NatsServer) -> None:
    done = _dead(server, "list")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["ID", "TENANT", "MODEL", "LANE", "REASON", "ATTEMPTS", "QUARANTINED", "ERROR"]
    assert rows[0].split(maxsplit=7)[:7] == [
        "one", "acme", "m", "interactive", "worker_lost", "1", "2001-09-09T01:46:40Z",
    ]  # fmt: skip
    assert len(rows) == 3
    assert "secret" not in done.stdout
    assert "\x1b" not in done.stdout
    done = _dead(server, "list", "--tenant", "nobody")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no request is in quarantine that these filters select\n"


def test_filters_select_by_model_tenant_and_lane(server: NatsServer) -> None:
    assert _listed(server, "--tenant", "acme") == [("one", "acme", "interactive"), ("two", "acme", "batch")]
    assert _listed(server, "--lane", "batch") == [("two", "acme", "batch"), ("two", "b", "batch")]
    assert _listed(server, "--model", "other") == []


def test_show_prints_the_whole_request(server: NatsServer) -> None:
    (shown,) = map(json.loads, _dead(server, "show", "one").stdout.splitlines())
    assert shown["request"]["text"] == "secret prompt"
    assert shown["attempts"] == [["w9", 3, 1.0, "died"]]


def test_drop_deletes_what_is_named_and_nothing_else(server: NatsServer) -> None:
    done = _dead(server, "drop", "two", "--tenant", "acme")
    assert json.loads(done.stdout) == {"id": "two", "tenant": "acme"}
    assert _listed(server) == [("one", "acme", "interactive"), ("two", "b", "batch")]
    assert _dead(server, "drop", "--all").returncode == 0
    assert _listed(server) == []
    for command in ("drop", "retry", "show"):
        done = _dead(server, command, "--all")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "no request is in quarantine\n")
    done = _dead(server, "drop", "--all", "--tenant", "b")
    assert (done.returncode, done.stderr) == (0, "no request is in quarantine that these filters select\n")


def test_letter_that_is_gone_meanwhile_is_dropped(server: NatsServer) -> None:
    async def drop_twice(client: Client) -> None:
        box = DeadLetterBox(client)
        (stored,) = [each async for each in box.letters(Selection(ids=frozenset({"one"})))]
        for _ in range(2):
            await box.drop(stored)

    _with_nats(server, drop_twice)
    assert ("one", "acme", "interactive") not in _listed(server)


def test_retry_makes_a_fresh_batch_job_and_takes_the_letter_away(server: NatsServer) -> None:
    done = _dead(server, "retry", "one")
    assert json.loads(done.stdout) == {"id": "one", "tenant": "acme", "result": "hr.result.acme.one"}
    assert ("one", "acme", "interactive") not in _listed(server)
    message = _with_nats(server, lambda client: client.jetstream().get_msg(batch_stream("acme"), 1))
    assert message.subject == "hr.req.m.batch.acme"
    job = decode_request(message.data or b"")
    assert (job.evicted, job.ready) == (None, None)
    assert (job.id, job.lane, job.epoch, job.emitted, job.deadline, job.reply) == ("one", "batch", 0, (), None, None)
    assert job.text == "secret prompt"


def _store_result(server: NatsServer, finish: FinishReason) -> None:
    result = BatchResult(id="two", model="m", tenant="acme", text="", finish=finish)

    async def store(client: Client) -> None:
        await client.jetstream().publish(result_subject("acme", "two"), msgspec.json.encode(result))

    _with_nats(server, store)


def test_retry_clears_a_stored_failure_so_that_the_new_result_can_be_written(server: NatsServer) -> None:
    _store_result(server, "failed")
    assert _dead(server, "retry", "two", "--tenant", "acme").returncode == 0
    headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
    subject = result_subject("acme", "two")
    assert _with_nats(server, lambda client: client.jetstream().publish(subject, b"new", headers=headers)).seq == 2


def test_retry_of_a_request_that_has_a_good_result_is_refused_and_changes_nothing(server: NatsServer) -> None:
    _store_result(server, "stop")
    done = _dead(server, "retry", "two", "--tenant", "acme")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "has a result already" in done.stderr
    assert len(_listed(server)) == 3


def test_one_that_cannot_be_retried_keeps_no_other_from_it(server: NatsServer) -> None:
    _store_result(server, "stop")
    done = _dead(server, "retry", "--all")
    assert (done.returncode, done.stderr.count("has a result already")) == (2, 1)
    retried = [(each["id"], each["tenant"]) for each in map(json.loads, done.stdout.splitlines())]
    assert retried == [("one", "acme"), ("two", "b")]
    assert _listed(server) == [("two", "acme", "batch")]


def test_request_whose_prompt_was_not_kept_is_not_retried(server: NatsServer) -> None:
    async def keep_too_large(client: Client) -> None:
        letter = _letter("large", "acme", "batch")
        request = msgspec.structs.replace(letter.request, text="x" * client.max_payload)
        await publish_dead_letter(client, msgspec.structs.replace(letter, request=request))

    _with_nats(server, keep_too_large)
    done = _dead(server, "retry", "large")
    assert done.returncode == 2
    assert "request 'large' was too large to be kept whole; publish it again" in done.stderr
    assert ("large", "acme", "batch") in _listed(server)


def test_full_queue_of_one_tenant_keeps_no_other_from_a_retry(server: NatsServer) -> None:
    full = tenant_stream_config("acme", StreamLimits(tenant_max_msgs=1))
    _with_nats(server, lambda client: ensure_batch_stream(client.jetstream(), full))
    done = _dead(server, "retry", "--all")
    assert done.returncode == 2
    assert done.stderr == "headrace: request 'two': the batch queue of tenant 'acme' is full; retry it later\n"
    assert _listed(server) == [("two", "acme", "batch")]


def test_unknown_id_is_named_in_one_line_and_nothing_is_touched(server: NatsServer) -> None:
    done = _dead(server, "drop", "one", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: not in quarantine: nope; `headrace dead list` shows its contents\n"
    assert len(_listed(server)) == 3


def test_missing_stream_and_missing_server_are_one_line_each(start_nats: Callable[..., NatsServer]) -> None:
    done = _dead(start_nats(), "list")
    assert (done.returncode, done.stderr) == (2, "headrace: the stream HR_DEAD does not exist; run `headrace setup`\n")
    done = headrace("dead", "--nats-url", f"nats://127.0.0.1:{free_port()}", "--timeout-s", "0.5", "list")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_running_system_is_found_by_its_state_directory(cli_system: System, state_dir: Path) -> None:
    done = headrace("dead", "--state-dir", str(state_dir), "list", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dropping_and_retrying_is_in_the_audit_log_letter_by_letter(server: NatsServer, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    variables = {"HEADRACE_AUDIT_FILE": str(audit)}
    headrace("dead", "--nats-url", server.url, "retry", "one", **variables)
    headrace("dead", "--nats-url", server.url, "drop", "--all", **variables)
    headrace("dead", "--nats-url", server.url, "list", **variables)
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    done = [(entry["action"], entry["outcome"], entry["what"]["id"], entry["what"]["tenant"]) for entry in entries]
    retried, *dropped = done
    assert retried == ("dead.retry", "done", "one", "acme")
    assert sorted(dropped) == [("dead.drop", "done", "two", "acme"), ("dead.drop", "done", "two", "b")]
    assert "secret prompt" not in audit.read_text()
