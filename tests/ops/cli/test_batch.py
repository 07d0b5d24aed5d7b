"""`headrace batch`: jobs are cancelled, whether they wait or run."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner
from nats.js.errors import APIError

from ops.cli.batch import _age, command
from ops.cli.batch_queue import BatchQueue
from shared.batch_streams import batch_stream
from shared.consumers import consumer_name
from shared.errors import DependencyError
from shared.kept_results import KeptResults
from shared.messages import Request, encode
from shared.nats_connection import connect
from shared.server_clock import ServerClock
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import Queue, request_subject
from tests.integration.system import System
from tests.ops.cli.command import headrace
from tests.ops.cli.jobs import publish
from tests.servers import NatsServer, pull_subscription
from tests.waiting import wait_for


def endless(job: str, max_tokens: int = 1500) -> dict[str, object]:
    return {"id": job, "text": "x", "sampling": {"max_tokens": max_tokens, "ignore_eos": True}}


def stored(system: System, job: str, tenant: str = "default") -> dict[str, Any] | None:
    """Return the result of a job, if it has one."""

    async def read() -> dict[str, object] | None:
        client = await nats.connect(system.info["admin_nats_url"])
        try:
            message = await client.jetstream().get_last_msg("HR_RESULTS", f"hr.result.{tenant}.{job}")
            return dict(json.loads(message.data or b"{}"))
        except nats.js.errors.NotFoundError:
            return None
        finally:
            await client.close()

    return asyncio.run(read())


def wait_for_running(system: System, count: int) -> None:
    """Wait until `count` batch jobs or more run; with 0 until none does, as jobs of other tests may."""

    def is_so() -> bool:
        running = system.gauge("headrace_worker_running_batch")
        return running >= count and (count > 0 or not running)

    wait_for(is_so, 60)


def ends_at_worker(state_dir: Path, job: str, count: int) -> dict[str, str]:
    """Return by tenant how the worker has ended the jobs of an id, as soon as there are `count` ends."""

    def ends() -> dict[str, str] | None:
        lines = (state_dir / "logs" / "worker-0.log").read_text().splitlines()
        told = [dict(re.findall(r"\b(id|tenant|outcome)=(\S+)", line)) for line in lines]
        found = {each["tenant"]: each["outcome"] for each in told if each.get("id") == job and "outcome" in each}
        return found if len(found) >= count else None

    return wait_for(ends, 60) or {}


def cancel(state_dir: Path, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
    done = headrace("batch", "--state-dir", str(state_dir), "cancel", *arguments, **variables)
    return done.returncode, [json.loads(line)["id"] for line in done.stdout.splitlines()], done.stderr


def test_job_that_waits_is_cancelled_and_its_publisher_told(
    cli_system: System, state_dir: Path, tmp_path: Path
) -> None:
    model, first, second = (f"m{secrets.token_hex(4)}" for _ in range(3))
    publish(state_dir, *({"id": each, "text": "x", "model": model} for each in (first, second)))
    assert cancel(state_dir, first, "--model", model) == (0, [first], "")
    result = stored(cli_system, first)
    assert result is not None
    assert (result["finish"], result["error"], result["model"]) == ("cancelled", "cancelled by an operator", model)
    assert stored(cli_system, second) is None
    audit = tmp_path / "audit.jsonl"
    code, ids, told = cancel(state_dir, first, second, HEADRACE_AUDIT_FILE=str(audit))
    assert (code, ids) == (2, [second])
    assert f"no job of tenant 'default' that waits or runs has the id {first}; it may have ended" in told
    line = json.loads(audit.read_text())
    assert (line["outcome"], line["what"]["num_cancelled"]) == ("failed", 1)
    assert first in line["error"]
    code, ids, told = cancel(state_dir, "--all", "--model", model)
    assert (code, ids) == (2, [])
    assert "waits or runs" in told


def test_job_that_runs_ends_with_what_it_has(cli_system: System, state_dir: Path) -> None:
    job = secrets.token_hex(4)
    wait_for_running(cli_system, 0)
    publish(state_dir, endless(job))
    wait_for_running(cli_system, 1)
    assert cancel(state_dir, job)[:2] == (0, [job])
    assert ends_at_worker(state_dir, job, 1) == {"default": "cancelled"}
    result = stored(cli_system, job)
    assert result is not None
    assert result["finish"] == "cancelled"
    # Its worker has ended it: the last saved progress is still empty.
    assert result["worker"]
    assert min(result["prompt_tokens"], result["completion_tokens"], len(result["text"])) > 0


def test_all_jobs_that_a_worker_holds_are_cancelled_at_once(cli_system: System, state_dir: Path) -> None:
    # Many more than it holds.
    jobs = [secrets.token_hex(4) for _ in range(80)]
    wait_for_running(cli_system, 0)
    publish(state_dir, *map(endless, jobs))
    wait_for_running(cli_system, 2)
    code, ids, told = cancel(state_dir, "--all", "--model", cli_system.model)
    assert (code, sorted(ids), told) == (0, sorted(jobs), "")
    results = [stored(cli_system, job) for job in jobs]
    assert {result["finish"] for result in results if result is not None} == {"cancelled"}


def num_taken(system: System) -> int:
    """Return the number of the last job that the worker took, once it takes no more."""

    async def read() -> int:
        client = await nats.connect(system.info["admin_nats_url"])
        try:
            info = await client.jetstream().consumer_info("HR_BATCH_default", consumer_name(system.model, "batch"))
            assert info.delivered is not None
            return info.delivered.stream_seq
        finally:
            await client.close()

    found = -1
    while found != (found := asyncio.run(read())):
        time.sleep(0.5)
    return found


def test_jobs_that_wait_are_not_computed_in_the_place_of_those_that_are_cancelled_before_them(
    cli_system: System, state_dir: Path
) -> None:
    # More than a worker holds.
    jobs = [secrets.token_hex(4) for _ in range(300)]
    wait_for_running(cli_system, 0)
    publish(state_dir, *(endless(job, 1900) for job in jobs))
    wait_for_running(cli_system, 2)
    last = num_taken(cli_system)
    code, ids, told = cancel(state_dir, "--all", "--model", cli_system.model)
    assert (code, ids, told) == (0, jobs, "")
    assert num_taken(cli_system) == last
    # The last one was left to this command.
    assert [bool((stored(cli_system, job) or {})["worker"]) for job in (jobs[0], jobs[-1])] == [True, False]


def test_cancelling_one_of_many_jobs_waits_for_no_other(
    cli_system: System, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.cli.batch_queue._WORKERS_ANSWER_S", 60.0)
    jobs = [secrets.token_hex(4) for _ in range(6)]
    wait_for_running(cli_system, 0)
    publish(state_dir, *map(endless, jobs))
    wait_for_running(cli_system, 2)

    async def cancel_one() -> float:
        client = await nats.connect(cli_system.info["admin_nats_url"])
        queue = BatchQueue(client, "default", ServerClock())
        [job] = [job async for job in queue.jobs(cli_system.model) if job.request.id == jobs[0]]
        began = time.monotonic()
        await queue.ask_workers([job])
        assert await queue.cancel(job)
        took_s = time.monotonic() - began
        await queue.close()
        await client.close()
        return took_s

    assert asyncio.run(cancel_one()) < 30.0
    assert cancel(state_dir, "--all", "--model", cli_system.model)[:2] == (0, jobs[1:])


async def test_job_that_left_the_queue_meanwhile_is_cancelled_and_a_silent_worker_is_not_waited_for(
    cli_system: System, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.cli.batch_queue._WORKERS_ANSWER_S", 0.5)
    model = f"m{secrets.token_hex(4)}"
    names = [secrets.token_hex(4) for _ in range(2)]
    await asyncio.to_thread(publish, state_dir, *({"id": name, "text": "x", "model": model} for name in names))
    client = await nats.connect(cli_system.info["admin_nats_url"])
    js = client.jetstream()
    # A worker takes them, and says nothing more.
    await (await pull_subscription(js, model, "batch")).fetch(2, timeout=10)
    queue = BatchQueue(client, "default", ServerClock())
    silent, gone = [job async for job in queue.jobs(model)]
    began = time.monotonic()
    await queue.ask_workers([silent, gone])
    assert 0.5 <= time.monotonic() - began < 5
    await js.delete_msg(batch_stream("default"), gone.seq)
    assert [await queue.cancel(job) for job in (silent, gone, silent)] == [True, True, True]
    assert [job async for job in queue.jobs(model)] == []
    await queue.close()
    await client.close()


def test_job_that_nats_refuses_to_cancel_keeps_no_other_from_it(
    cli_system: System, state_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, bad, *good = (f"m{secrets.token_hex(4)}" for _ in range(4))
    publish(state_dir, *({"id": name, "text": "x", "model": model} for name in (good[0], bad, good[1])))
    store = KeptResults.store

    async def refuse(kept: KeptResults, tenant: str, request_id: str, *rest: Any) -> bool:
        if request_id == bad:
            raise APIError(500, "no space left", 10077)
        return await store(kept, tenant, request_id, *rest)

    monkeypatch.setattr(KeptResults, "store", refuse)
    options = ["--state-dir", str(state_dir), "--audit-file", str(tmp_path / "audit.jsonl")]
    done = CliRunner().invoke(command, [*options, "cancel", "--all", "--model", model])
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == good
    assert isinstance(done.exception, DependencyError)
    assert str(done.exception) == f"job '{bad}' could not be cancelled: no space left"
    monkeypatch.undo()
    assert cancel(state_dir, "--all", "--model", model)[:2] == (0, [bad])


def test_job_of_another_tenant_with_the_same_id_goes_on(cli_system: System, state_dir: Path) -> None:
    job, tenant = secrets.token_hex(4), f"t{secrets.token_hex(4)}"
    assert headrace("setup", "--state-dir", str(state_dir), "--tenants", f"default,{tenant}").returncode == 0
    # Once it has a result, the worker knows the new queue and takes jobs from it at once.
    publish(state_dir, {"text": "x"}, tenant=tenant, wait=True)
    wait_for_running(cli_system, 0)
    for each in (tenant, "default"):
        publish(state_dir, endless(job), tenant=each)
    assert cancel(state_dir, job, "--tenant", "default")[:2] == (0, [job])
    cancelled, whole = (
        wait_for(lambda owner=each: stored(cli_system, job, owner), 60) or {}  # type: ignore[misc]
        for each in ("default", tenant)
    )
    assert (cancelled["tenant"], cancelled["finish"]) == ("default", "cancelled")
    assert (whole["tenant"], whole["finish"], whole["completion_tokens"]) == (tenant, "length", 1500)


def listed(state_dir: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    done = headrace("batch", "--state-dir", str(state_dir), "list", "--jobs", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_jobs_that_wait_and_run_are_listed_oldest_first(cli_system: System, state_dir: Path) -> None:
    model, running, *waiting = (f"m{secrets.token_hex(4)}" for _ in range(4))
    assert listed(state_dir, "--model", model) == ([], "")
    none = headrace("batch", "--state-dir", str(state_dir), "list", "--model", model)
    assert (none.returncode, none.stdout) == (0, "")
    assert none.stderr == f"no job of tenant 'default' waits or runs for {model!r}\n"
    wait_for_running(cli_system, 0)
    queued: list[dict[str, object]] = [{"id": name, "text": "x", "model": model} for name in waiting]
    publish(state_dir, endless(running, 1900), *queued)
    wait_for_running(cli_system, 1)
    rows, told = listed(state_dir)
    assert told == ""
    # Jobs of other tests may wait, too.
    shown = {row["id"]: (row["model"], row["queue"], row["state"]) for row in rows}
    assert shown[running] == (cli_system.model, "batch", "taken")
    assert {shown[name] for name in waiting} == {(model, "batch", "waiting")}
    ages = [row["age_s"] for row in rows]
    assert ages == sorted(ages, reverse=True)
    assert [0 <= row["age_s"] < 120 and abs(time.time() - row["queued"]) < 120 for row in rows if row["id"] in shown]
    assert [row["id"] for row in listed(state_dir, "--model", model)[0]] == waiting
    rows, told = listed(state_dir, "--model", model, "--limit", "1")
    assert ([row["id"] for row in rows], told) == (waiting[:1], "the oldest 1 of 2 jobs; --limit shows more\n")
    table = headrace("batch", "--state-dir", str(state_dir), "list", "--model", model).stdout.splitlines()
    assert [line.split()[:4] for line in table] == [
        ["ID", "MODEL", "QUEUE", "STATE"],
        *([name, model, "batch", "waiting"] for name in waiting),
    ]
    assert sorted(cancel(state_dir, *waiting)[1]) == sorted(waiting)
    # It may have ended meanwhile.
    cancel(state_dir, running)


def test_jobs_of_a_tenant_without_a_queue_cannot_be_listed(cli_system: System, state_dir: Path) -> None:
    done = headrace("batch", "--state-dir", str(state_dir), "list", "--tenant", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "tenant 'nobody' has no batch queue" in done.stderr


def test_ages_are_short() -> None:
    ages = (0.2, 119.0, 120.0, 7199.0, 7200.0, 3 * 86400.0)
    assert [_age(age) for age in ages] == ["0 s", "119 s", "2 min", "120 min", "2 h", "3 d"]


async def test_background_responses_are_jobs_that_can_be_listed_and_cancelled(
    start_nats: Callable[..., NatsServer],
) -> None:
    admin = await connect(start_nats().url, role="admin", name="admin")
    js = admin.jetstream()
    await ensure_streams(js, StreamLimits(), ["a b"])
    places: list[tuple[str, Queue]] = [("m", "batch"), ("m", "background"), ("n", "background")]
    for number, (model, queue) in enumerate(places):
        job = Request(id=f"j{number}", model=model, tenant="a b", lane="batch", text="x")
        await js.publish(request_subject(model, queue, "a b"), encode(job))
    jobs = BatchQueue(admin, "a b", ServerClock())
    assert [job.request.id async for job in jobs.jobs("m")] == ["j0", "j1"]
    all_jobs = [job async for job in jobs.jobs(None)]
    assert [job.request.id for job in all_jobs] == ["j0", "j1", "j2"]
    assert await jobs.cancel(all_jobs[2])
    assert [job.request.id async for job in jobs.jobs(None)] == ["j0", "j1"]
    await jobs.close()
    await admin.close()
