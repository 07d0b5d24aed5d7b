"""The disk under NATS is full for a while: interactive work goes on, and the batch lane recovers by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from ops.chaos import aftermath
from ops.chaos.faults import Drain
from ops.chaos.load import Load
from ops.chaos.mix import plain_bodies
from ops.chaos.outcome import NotPossibleHereError, Outcome
from ops.chaos.scenarios.batch import NUM_KINDS, RESULTS_TIMEOUT_S, Publisher, judge, learn_results
from ops.chaos.system import System, SystemOptions

DISK_BYTES = 24 << 20
FULL_S = 6.0
RECOVERY_S = 30.0
# NATS sees a small file system in a mount namespace, which a process of its own keeps; this works without root where
# users may make namespaces.
_UNSHARE = ("unshare", "--mount", "--map-root-user")
_MOUNT = (*_UNSHARE, "sh", "-c", f'mount -t tmpfs -o size={DISK_BYTES} disk "$0" && echo mounted && exec sleep 600')


async def full(num_requests: int | None) -> Outcome:
    """The disk is full for six seconds while jobs and interactive requests come."""
    outcome = Outcome("full-disk", "0 people failed, batch back by itself")
    if not _can_mount():
        raise NotPossibleHereError("a small disk needs `unshare --mount --map-root-user`")
    directory = Path(tempfile.gettempdir()) / f"headrace-chaos-disk-{os.getpid()}"
    directory.mkdir()
    holder = subprocess.Popen([*_MOUNT, str(directory)], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"mounted\n"
    enter = ("nsenter", "--target", str(holder.pid), "--mount", "--user", "--preserve-credentials")
    options = SystemOptions(num_workers=2, nats_command_prefix=enter, store_directory=directory)
    ballast = Path(f"/proc/{holder.pid}/root{directory}/ballast")
    try:
        async with System(options) as system, Publisher(system) as publisher:
            await _fill_and_free(system, publisher, ballast, outcome, num_requests or 100)
    finally:
        holder.kill()
        holder.communicate()  # an end that is left open fails the test
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


async def _fill_and_free(system: System, publisher: Publisher, ballast: Path, outcome: Outcome, number: int) -> None:
    load = Load(system, plain_bodies(100, 4))
    await load.learn_references()
    expected = await learn_results(publisher)
    # Jobs hardly advance beside it: their results are awaited behind it.
    async with load.going_on(8):
        for index in range(number):
            await publisher.publish_surely(f"before-{index}", index % NUM_KINDS)
        began = time.monotonic()
        outcome.figures["filled bytes"] = _fill(ballast)
        refused = 0
        while time.monotonic() - began < FULL_S:
            refused += not await publisher.publish(f"during-{refused}", 0)
            await asyncio.sleep(0.05)
        ballast.unlink()  # noqa: ASYNC240
        freed = time.monotonic()
        outcome.figures["jobs refused while full"] = refused
        # NATS itself fails each write to the stream until it is started anew; `headrace up` does that (`StorageWatch`).
        await Drain(0.0, 0.0, "nats").run(system)
        try:
            await asyncio.wait_for(publisher.publish_surely("after-0", 0), RECOVERY_S)
            outcome.figures["batch takes jobs again after s"] = round(time.monotonic() - freed, 2)
        except TimeoutError:
            outcome.problems.append(f"jobs were still refused {RECOVERY_S:g} s after there was room")
    outcome.count(load.ledger, [(began, freed)])
    acknowledged = [job_id for job_id in publisher.published if job_id.startswith(("before", "after"))]
    judge(outcome, acknowledged, await publisher.results(acknowledged, RESULTS_TIMEOUT_S), expected)
    outcome.figures["all results after s"] = round(time.monotonic() - freed, 1)
    await aftermath.check(system, load, outcome)


def _can_mount() -> bool:
    return subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True).returncode == 0


def _fill(path: Path) -> int:
    """Write to a file until its disk is full, and return how much went in."""
    size = 0
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                size += file.write(bytes(65536))
        except OSError:
            return size
