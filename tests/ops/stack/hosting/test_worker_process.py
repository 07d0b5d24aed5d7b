"""A worker that a host starts: its arguments, and how the host handles one that exits or never joins."""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ops.stack.console import Console
from ops.stack.hosting import worker_process
from ops.stack.hosting.wishes import Wish
from ops.stack.hosting.worker_process import HostedWorker, WorkerProcess
from shared.worker_metrics import WorkerMetrics
from tests.gateway.fleet.test_fleet import BEAT
from tests.waiting import until

WISH = Wish(name="m", path="/m", options={"max_num_seqs": "3"}, kv_cache_bytes=7)


class Hosted:
    """A process of a host, and its ends."""

    def __init__(self, directory: Path, script: str = "exec sleep 60", wish: Wish = WISH) -> None:
        self.ended: list[HostedWorker] = []
        environ = {**os.environ, "HEADRACE_MAX_NUM_SEQS": "9", "HEADRACE_WORKER_ID": "of-the-host"}
        self.worker = WorkerProcess(wish, environ, directory, Console(io.StringIO()), 10.0, self.ended.append)
        self.spec = self.worker._child.spec
        self.worker._child.spec = replace(self.spec, command=("sh", "-c", script))


async def test_process_is_told_its_model_and_what_was_ordered_before_what_the_host_has(tmp_path: Path) -> None:
    own = ("MODEL", "SERVED_MODEL_NAME", "WORKER_ID", "MAX_NUM_SEQS", "KV_CACHE_BYTES", "DRAIN_TIMEOUT_S")
    first, second = Hosted(tmp_path), Hosted(tmp_path)
    told = first.spec.environ
    assert [told[f"HEADRACE_{name}"] for name in own] == ["/m", "m", first.worker.id, "3", "7", "30"]
    assert first.spec.command[1:] == ("-P", "-m", "ops.cli", "worker")
    assert first.worker.id != second.worker.id
    # A model that replaces another serves beside it for a while.
    assert "HEADRACE_ALLOW_REVISION_CHANGE" not in told
    replacing = Hosted(tmp_path, wish=msgspec.structs.replace(WISH, generation=1)).spec.environ
    assert replacing["HEADRACE_ALLOW_REVISION_CHANGE"] == "true"


@pytest.mark.parametrize(("status", "is_of_settings"), [(2, True), (1, False)])
async def test_process_that_ends_by_itself_says_why_and_is_not_started_again(
    tmp_path: Path, status: int, is_of_settings: bool
) -> None:
    hosted = Hosted(tmp_path, f"echo begun; echo headrace: no tokenizer; exit {status}")
    hosted.worker.start()
    await until(lambda: hosted.ended, 30)
    log = tmp_path / f"{hosted.worker.id}.log"
    assert hosted.worker.failure == f"exited with code {status}: no tokenizer (its log: {log})"
    assert hosted.worker.has_bad_settings == is_of_settings
    assert log.read_text().count("begun") == 1


@pytest.mark.parametrize("has_joined", [False, True])
async def test_process_that_never_joins_is_killed_and_one_that_is_stopped_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_joined: bool
) -> None:
    hosted = Hosted(tmp_path)
    hosted.worker.start()
    await until(lambda: hosted.worker.pid, 30)
    pid = hosted.worker.pid
    assert hosted.worker.phase == "loading"
    hosted.worker.watch(0.2, can_judge=True)
    monkeypatch.setattr(worker_process, "START_TIMEOUT_S", 0.0)
    if has_joined:
        assert hosted.worker.note_heartbeat(BEAT) is not None
        assert hosted.worker.note_heartbeat(BEAT) is None
    hosted.worker.watch(0.2, can_judge=True)
    if has_joined:
        await asyncio.sleep(0.1)
        assert (hosted.worker.phase, hosted.worker.pid) == ("ready", pid)
    else:
        await until(lambda: hosted.ended, 30)
        assert (hosted.worker.failure or "").startswith("was killed by SIGKILL")
    hosted.worker.stop()
    assert hosted.worker.phase == "stopping"
    await hosted.worker.wait()
    assert (hosted.ended[-1], hosted.worker.pid) == (hosted.worker, None)
    assert (hosted.worker.failure is None) == has_joined


async def test_worker_is_busy_with_what_runs_or_waits_and_people_wait_for_what_is_no_batch_job(tmp_path: Path) -> None:
    worker = Hosted(tmp_path).worker

    def seen(running: int, waiting: int, batch: tuple[int, int] | None) -> tuple[bool, bool]:
        metrics = None if batch is None else WorkerMetrics(running_batch=batch[0], waiting_batch=batch[1])
        worker.note_heartbeat(msgspec.structs.replace(BEAT, running=running, waiting=waiting, metrics=metrics))
        return worker.seen().busy, worker.seen().serves_people

    assert not worker.seen().busy
    assert seen(0, 0, None) == (False, False)
    assert seen(0, 1, None) == seen(1, 0, (0, 0)) == seen(2, 1, (1, 1)) == (True, True)
    assert seen(2, 1, (2, 1)) == (True, False)
