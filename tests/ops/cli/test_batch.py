"""`headrace batch`: jobs are cancelled, whether they wait or run."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path

import nats
import pytest

from tests.integration.system import System
from tests.ops.cli.command import headrace


def publish(state_dir: Path, *lines: dict[str, object]) -> None:
    given = "\n".join(map(json.dumps, lines))
    options = ["--state-dir", str(state_dir), "--queue-unserved"]
    done = headrace("publish", "--file", "-", *options, given=given)
    assert done.returncode == 0, done.stderr


def stored(system: System, job: str) -> dict[str, object] | None:
    """Return the result of a job, if it has one."""

    async def read() -> dict[str, object] | None:
        client = await nats.connect(system.info["admin_nats_url"])
        try:
            message = await client.jetstream().get_last_msg("HR_RESULTS", f"hr.result.default.{job}")
            return dict(json.loads(message.data or b"{}"))
        except nats.js.errors.NotFoundError:
            return None
        finally:
            await client.close()

    return asyncio.run(read())


def cancel(state_dir: Path, *arguments: str) -> tuple[int, list[str], str]:
    done = headrace("batch", "--state-dir", str(state_dir), "cancel", *arguments)
    return done.returncode, [json.loads(line)["id"] for line in done.stdout.splitlines()], done.stderr


def test_job_that_waits_is_cancelled_and_its_publisher_told(cli_system: System, state_dir: Path) -> None:
    model, first, second = (f"m{secrets.token_hex(4)}" for _ in range(3))
    publish(state_dir, *({"id": each, "text": "x", "model": model} for each in (first, second)))
    assert cancel(state_dir, first, "--model", model) == (0, [first], "")
    result = stored(cli_system, first)
    assert result is not None
    assert (result["finish"], result["error"], result["model"]) == ("cancelled", "cancelled by an operator", model)
    assert stored(cli_system, second) is None
    code, ids, told = cancel(state_dir, first, second)
    assert (code, ids) == (2, [second])
    assert f"no job of tenant 'default' that waits or runs has the id {first}; it may have ended" in told
    code, ids, told = cancel(state_dir, "--all", "--model", model)
    assert (code, ids) == (2, [])
    assert "waits or runs" in told


def test_job_that_runs_ends_with_what_it_has(cli_system: System, state_dir: Path) -> None:
    job = secrets.token_hex(4)
    running = cli_system.gauge("headrace_worker_running_batch")
    publish(state_dir, {"id": job, "text": "x", "sampling": {"max_tokens": 1500, "ignore_eos": True}})
    deadline = time.monotonic() + 60
    while cli_system.gauge("headrace_worker_running_batch") <= running:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cancel(state_dir, job)[:2] == (0, [job])
    while cli_system.gauge("headrace_worker_running_batch") > running:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    result = stored(cli_system, job)
    assert result is not None
    assert result["finish"] == "cancelled"


@pytest.mark.parametrize("arguments", [[], ["some-id", "--all"]])
def test_ids_or_all_are_needed(state_dir: Path, arguments: list[str]) -> None:
    code, ids, told = cancel(state_dir, *arguments)
    assert (code, ids) == (2, [])
    assert "Give ids of jobs, or --all" in told
