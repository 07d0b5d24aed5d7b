"""One request kills every worker that takes it: it alone may fail."""

from __future__ import annotations

import asyncio
import math
import time

from ops.chaos import aftermath
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.poisoned_worker import POISON_SEED
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System, SystemOptions

NUM_NEIGHBOURS = 40
_RESTART_S = 0.3
_OPTIONS = SystemOptions(num_workers=3, simulate_ms=5.0, worker_module="ops.chaos.poisoned_worker")


async def poison(num_requests: int | None) -> Outcome:
    """Forty long streams run on three workers when a poisonous request comes.

    `num_requests` are the neighbours: each forty of them meet a poison of another prompt, because one that is known
    costs fewer workers.
    """
    outcome = Outcome("poison", "0 neighbours failed, poison 5xx with its id")
    async with System(_OPTIONS) as system:
        load = Load(system, plain_bodies(1000, NUM_NEIGHBOURS))
        await load.learn_references()
        supervising = asyncio.create_task(system.supervise(_RESTART_S))
        windows, ended_after_s = [], []
        for number in range(math.ceil((num_requests or NUM_NEIGHBOURS) / NUM_NEIGHBOURS)):
            loading = asyncio.create_task(load.run(NUM_NEIGHBOURS, NUM_NEIGHBOURS))
            await asyncio.sleep(2.0)
            began = time.monotonic()
            entry = await _ask_poison(system, number)
            ended_after_s.append(round(time.monotonic() - began, 2))
            await loading
            windows.append((began, time.monotonic()))
            _judge_poison(entry, outcome)
        outcome.count(load.ledger, windows)
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        outcome.figures |= {"poisons": len(windows), "poison ended after s": max(ended_after_s)}
        outcome.figures["worker deaths"] = sum(part.num_exits for part in system.workers)
        await aftermath.check(system, load, outcome)
    return outcome


async def _ask_poison(system: System, number: int) -> Entry:
    fields = plain_bodies(50, 1)[0].json | {"prompt": f"poison {number}", "seed": POISON_SEED}
    gateway = system.gateways[0].name
    entry = Entry(0, gateway, time.monotonic())
    await ask(Body("/v1/completions", fields), system.port(gateway), API_KEY, entry, 60.0)
    return entry


def _judge_poison(entry: Entry, outcome: Outcome) -> None:
    verdict = entry.judge(None)
    is_told = verdict is Verdict.FAILED and bool(entry.request_id) and (entry.status or 0) in (200, 500, 502)
    outcome.expect(is_told, f"the poisonous request is {verdict.value}: status {entry.status}, {entry.error}")
    outcome.figures["poison's error"] = entry.error
