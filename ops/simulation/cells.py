"""A fleet in cells: systems with a queue and a gateway of their own, among which requests are dealt out in turn.

Cells know nothing of each other, so they are simulated side by side in processes. What they show together depends on
the number of cells, and not on that of processes or on the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import msgspec

from ops.simulation.gateway import Progress
from ops.simulation.outcome import Moment, Outcome
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.workload import Arrival
from shared.errors import HeadraceError

_REPORT_S = 0.5
_encode = msgspec.msgpack.Encoder().encode
# An array is progress, a map what a cell has shown.
_decode = msgspec.msgpack.Decoder(Progress | Outcome).decode
Report = Callable[[Progress], None]


class CellError(HeadraceError):
    """A process that simulated a cell has died."""


def simulate_cells(
    scenario: Scenario, arrivals: Callable[[], Iterator[Arrival]], num_cells: int, report: Report | None = None
) -> Outcome:
    """Serve requests by a fleet in cells, in as many processes as this one may use cores.

    Args:
        scenario: The whole fleet; each cell has an equal part of its workers.
        arrivals: Begins the requests anew, for each cell.
        num_cells: A divisor of the number of workers.
        report: Called with the progress of all cells together, at the time of the slowest one that runs.

    Raises:
        CellError: A process has died, as for want of memory.
    """
    next(arrivals(), None)  # what cannot be read is refused here
    cells = [_cell(scenario, number, num_cells) for number in range(num_cells)]
    num_processes = min(num_cells, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    parts: list[Outcome] = []
    for first in range(0, num_cells, num_processes):
        numbers = range(first, min(num_cells, first + num_processes))
        works = [partial(simulate, cells[at], islice(arrivals(), at, None, num_cells)) for at in numbers]
        parts += _run_all(works, report, sum(part.num_requests for part in parts))
    return _merged(parts)


def _cell(scenario: Scenario, number: int, num_cells: int) -> Scenario:
    size = scenario.workers // num_cells
    first = number * size
    kills = tuple((worker - first, at) for worker, at in scenario.kills if first <= worker < first + size)
    return replace(scenario, workers=size, kills=kills, seed=scenario.seed * num_cells + number)


def _run_all(works: Sequence[Callable[[Report], Outcome]], report: Report | None, num_ended: int) -> list[Outcome]:
    """Run each in a process of its own; none is left when this returns or raises. `num_ended` is of those before."""
    context = multiprocessing.get_context("fork")
    started: dict[Connection, ForkProcess] = {}
    progress: dict[Connection, Progress] = {}
    outcomes: dict[Connection, Outcome] = {}
    try:
        for work in works:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work, writer))
            process.start()
            started[reader] = process
            # With its end the pipe ends.
            writer.close()
        while waited := started.keys() - outcomes.keys():
            ready = set(wait(list(waited)))
            for reader in waited & ready:
                told = _decode(reader.recv_bytes())
                if isinstance(told, Outcome):
                    outcomes[reader] = told
                    continue
                progress[reader] = told
                if report is not None:
                    num = num_ended + sum(each.num_ended for each in progress.values())
                    report(Progress(num, min(each.at for reader, each in progress.items() if reader in waited)))
        return [outcomes[reader] for reader in started]
    except EOFError:
        problem = "a process that simulated a part of the fleet has died; its memory may not have sufficed"
        raise CellError(problem) from None
    finally:
        for reader, process in started.items():
            reader.close()
            process.kill()
            process.join()


def _send(work: Callable[[Report], Outcome], writer: Connection) -> None:
    next_at = time.monotonic() + _REPORT_S

    def report(progress: Progress) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _REPORT_S
            writer.send_bytes(_encode(progress))

    # The parent tells of an interrupt.
    with suppress(KeyboardInterrupt):
        writer.send_bytes(_encode(work(report)))


def _merged(parts: list[Outcome]) -> Outcome:
    """Add up what cells have shown; their heartbeats come at the same times."""
    gaps: Counter[int] = Counter()
    for part in parts:
        gaps.update(part.gaps)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in Outcome.__struct_fields__
        if name.startswith("num_") or name == "device_s"
    }
    return Outcome(
        **sums,
        ttfts_s=[each for part in parts for each in part.ttfts_s],
        ends_s=[each for part in parts for each in part.ends_s],
        gaps=gaps,
        moments=list(_moments([part.moments for part in parts])),
        duration_s=max(part.duration_s for part in parts),
    )


def _moments(cells: list[list[Moment]]) -> Iterator[Moment]:
    for place in range(max(map(len, cells))):
        # One that has ended runs nothing more, and stays where it was.
        alike = [
            each[place] if place < len(each) else replace(each[-1], running=0, waiting=0, kv_share=0.0)
            for each in cells
        ]
        num_workers = sum(each.num_workers for each in alike)
        yield Moment(
            at=max(each.at for each in alike),
            running=sum(each.running for each in alike),
            waiting=sum(each.waiting for each in alike),
            kv_share=sum(each.kv_share * each.num_workers for each in alike) / max(1, num_workers),
            device_s=sum(each.device_s for each in alike),
            num_tokens=sum(each.num_tokens for each in alike),
            num_refusals=sum(each.num_refusals for each in alike),
            num_workers=num_workers,
        )
