"""Each process dies at each moment of a request's life: the table of `ops/decisions`, cell by cell, on one system.

The request under test (the *probe*) goes through gateway-0. A cell ends when everything is back, nothing is held, and
an ordinary request is answered by each gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios.batch import Publisher, learn_results
from ops.chaos.stream_client import StreamClient, ask
from ops.chaos.system import API_KEY, System, SystemOptions

MOMENTS = ("before claim", "prefill", "streaming", "finishing", "draining", "idle")
PROCESSES = ("worker", "gateway", "nats", "redis", "client", "publisher")
NUM_TOKENS = 60
PREFILL_S = 0.2
TIMEOUT_S = 30.0
WORKERS = ("worker-0", "worker-1")
# A prompt of 400 words takes many steps of 16 tokens; eight streams fill the slots of both workers.
_OPTIONS = SystemOptions(
    num_gateways=2,
    num_workers=2,
    simulate_ms=20.0,
    worker={"max_num_seqs": 4, "max_num_batched_tokens": 16, "drain_timeout_s": 1},
)
_PROBE = plain_bodies(NUM_TOKENS, 1, prompt_words=400)
_BLOCKERS = plain_bodies(120, 8)


@dataclass
class Cell:
    """One death: who, when, and what the probe made of it."""

    process: str
    moment: str
    system: System
    probe: Load
    blockers: Load
    entry: Entry = field(default_factory=lambda: Entry(0, "gateway-0", time.monotonic()))
    client: StreamClient | None = None

    @property
    def num_outputs(self) -> int:
        """Characters received so far."""
        return sum(len(choice.text) for choice in self.entry.choices.values())

    def keep(self, client: StreamClient) -> None:
        """Keep the client, which the cell acts on."""
        self.client = client


async def all_moments(num_requests: int | None) -> Outcome:
    """Run all cells; every request ends as the table says."""
    outcome = Outcome("moments", "each cell as in the table")
    async with System(_OPTIONS) as system:
        probe, blockers = Load(system, _PROBE), Load(system, _BLOCKERS, gateways=("gateway-1",))
        await probe.learn_references()
        await blockers.learn_references()
        async with Publisher(system) as publisher:
            expected = (await learn_results(publisher))[0]
        for process in PROCESSES:
            for moment in MOMENTS:
                cell = Cell(process, moment, system, probe, blockers.fresh())
                began = time.monotonic()
                outcome.num_requests += 1
                problems = await (_run_job(cell, expected) if process == "publisher" else _run(cell))
                problems += await _settle(cell)
                took_s = time.monotonic() - began
                outcome.figures[f"{process}, {moment}"] = f"{'kept' if not problems else 'BROKEN'} in {took_s:.1f} s"
                outcome.num_failed += bool(problems)
                outcome.problems += [f"{process} dies, {moment}: {problem}" for problem in problems]
    return outcome


async def _run(cell: Cell) -> list[str]:
    blocking = await _block(cell) if cell.moment == "before claim" else None
    cell.entry = Entry(0, "gateway-0", time.monotonic())
    asking = asyncio.create_task(_ask(cell)) if cell.moment != "idle" else None
    await _until_moment(cell)
    draining = [asyncio.create_task(cell.system.part(name).terminate()) for name in _drained(cell)]
    if draining:
        await asyncio.sleep(0.1)
    await _die(cell)
    await asyncio.gather(*draining)
    await _revive(cell.system)
    if blocking is not None:
        await blocking
    if asking is None:
        return []
    await asking
    cell.entry.is_gateway_killed = cell.process == "gateway"
    return _judge(cell)


def _judge(cell: Cell) -> list[str]:
    ends = [{"gateway": Verdict.LOST_WITH_GATEWAY, "client": Verdict.ABORTED}.get(cell.process, Verdict.OK)]
    if cell.moment in ("finishing", "draining") and cell.process in ("gateway", "client"):
        ends.append(Verdict.OK)  # the answer may have been complete
    verdict = cell.entry.judge(cell.probe.ledger.references[0])
    if cell.moment == "draining" and cell.process == "gateway" and cell.entry.error:
        return []  # it said itself that it shuts down
    problems = [] if verdict in ends else [f"the probe is {verdict.value}: {cell.entry.status} {cell.entry.error}"]
    broken = cell.blockers.ledger.broken()
    if broken:
        problems.append(f"{len(broken)} neighbours broken: {broken[0].status} {broken[0].error}")
    return problems


async def _ask(cell: Cell) -> None:
    port = cell.system.port("gateway-0")
    await ask(_PROBE[0], port, API_KEY, cell.entry, TIMEOUT_S, began=cell.keep)


async def _block(cell: Cell) -> asyncio.Task[None]:
    blocking = asyncio.create_task(cell.blockers.run(len(_BLOCKERS), len(_BLOCKERS)))
    await _until(lambda: cell.blockers.num_open == len(_BLOCKERS))
    return blocking


async def _until_moment(cell: Cell) -> None:
    match cell.moment:
        case "before claim" | "prefill":
            await asyncio.sleep(PREFILL_S)
        case "streaming" | "draining":
            await _until(lambda: cell.num_outputs >= NUM_TOKENS // 4)
        case "finishing":
            await _until(lambda: cell.num_outputs >= NUM_TOKENS - 2)


def _drained(cell: Cell) -> tuple[str, ...]:
    if cell.moment != "draining":
        return ()
    return ("gateway-0",) if cell.process == "gateway" else WORKERS


async def _die(cell: Cell) -> None:
    system = cell.system
    match cell.process:
        case "worker":
            for name in WORKERS:
                system.part(name).kill()
        case "gateway":
            system.part("gateway-0").kill()
        case "client":
            if cell.client is not None:
                cell.client.abort()
        case name:
            system.part(name).kill()


async def _revive(system: System) -> None:
    for part in (system.nats, system.redis, *system.workers, *system.gateways):
        await part.revive()
    await system.wait_ready()


async def _run_job(cell: Cell, expected: dict[str, object]) -> list[str]:
    """Publish a job, let its publisher die at the moment, and look for the result with another connection."""
    job_id = f"moment-{cell.moment.replace(' ', '-')}"
    async with Publisher(cell.system) as publisher:
        blocking = await _block(cell) if cell.moment == "before claim" else None
        await publisher.publish_surely(job_id, 0)
        waits_s = {"streaming": 0.6, "finishing": 1.2, "draining": 0.6, "idle": 2.5}
        await asyncio.sleep(waits_s.get(cell.moment, PREFILL_S))
        draining = [asyncio.create_task(cell.system.part(name).terminate()) for name in _drained(cell)]
    await asyncio.gather(*draining)
    await _revive(cell.system)
    if blocking is not None:
        await blocking
    async with Publisher(cell.system) as reader:
        results = await reader.results([job_id], TIMEOUT_S)
    if job_id not in results:
        return ["the job has no result"]
    return [] if results[job_id]["token_ids"] == expected["token_ids"] else ["the job's result is wrong"]


async def _settle(cell: Cell) -> list[str]:
    """Return what is not as before the cell, after waiting for it."""
    system, problems = cell.system, []
    try:
        await _until(lambda: not any(seen.running or seen.waiting for seen in system.observer.live_workers(1.0)))
        blocks = [seen.free_blocks == seen.total_blocks for seen in system.observer.live_workers(1.0)]
        if not all(blocks):
            problems.append("blocks are missing")
    except TimeoutError:
        problems.append("workers still hold something")
    for gateway in system.gateways:
        verdict = await cell.probe.ask_once(gateway=gateway.name)
        if verdict is not Verdict.OK:
            problems.append(f"an ordinary request to {gateway.name} afterwards is {verdict.value}")
    return problems


async def _until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
