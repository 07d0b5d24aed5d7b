from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice

import pytest

from ops.simulation.cells import CellError, simulate_cells
from ops.simulation.gateway import Progress
from ops.simulation.report import figures
from ops.simulation.scenario import simulate
from ops.simulation.workload import Arrival, Synthetic
from tests.ops.simulation.fleets import PLAIN

LOAD = Synthetic(200, 40.0, 64, 20, spread=0.5)
FLEET = replace(PLAIN, workers=4, kills=((1, 1.0), (3, 1.5)))


def arrivals() -> Iterator[Arrival]:
    return LOAD.arrivals(7)


def test_bytes_depend_on_cells_and_not_on_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for num_cores in (1, 2, 2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num=num_cores: set(range(num)))
        shown.append(json.dumps(figures(FLEET, simulate_cells(FLEET, arrivals, 2), None, {})))
    assert shown[0] == shown[1] == shown[2]
    assert shown[0] != json.dumps(figures(FLEET, simulate_cells(FLEET, arrivals, 4), None, {}))


def test_cells_add_up_to_the_fleet() -> None:
    found = simulate_cells(FLEET, arrivals, 2)
    parts = [
        simulate(replace(PLAIN, workers=2, kills=((1, at),), seed=number), islice(arrivals(), number, None, 2))
        for number, at in enumerate((1.0, 1.5))
    ]
    assert found.num_served == 200 == sum(part.num_served for part in parts)
    assert found.num_moves == sum(part.num_moves for part in parts) > 0
    assert sorted(found.ttfts_s) == sorted(parts[0].ttfts_s + parts[1].ttfts_s)
    assert found.duration_s == max(part.duration_s for part in parts)
    assert min(part.itl_s[99] for part in parts) <= found.itl_s[99] <= max(part.itl_s[99] for part in parts)
    alive = [moment.num_workers for moment in found.moments]
    assert alive[:2] == [4, 4]
    assert alive[-1] == 2
    assert found.moments[-1].num_tokens == sum(part.moments[-1].num_tokens for part in parts)


def test_progress_of_all_cells_is_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.simulation.cells._REPORT_S", 0.0)
    for num_cores in (1, 2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num=num_cores: set(range(num)))
        told: list[Progress] = []
        found = simulate_cells(FLEET, arrivals, 2, told.append)
        counts = [progress.num_ended for progress in told]
        assert counts == sorted(counts)
        assert 150 <= counts[-1] <= 200 == found.num_served
        assert told[-1].at <= found.duration_s


def test_process_that_dies_is_an_error_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real_fork, pids, calls = os.fork, list[int](), count()

    def fork() -> int:
        pid = real_fork()
        pids.append(pid)
        return pid

    def dying(call: int) -> Iterator[Arrival]:
        yield Arrival(0.0, 10, 2)
        if call == 1:
            os._exit(9)
        time.sleep(600.0)

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(CellError, match="memory"):
        # The first call only checks; the second one is for the cell that dies.
        simulate_cells(replace(PLAIN, workers=2), lambda: dying(next(calls)), 2)
    left = []
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
            os.kill(pid, signal.SIGKILL)
            left.append(pid)
    assert (len(pids), left) == (2, [])
