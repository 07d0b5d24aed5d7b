"""Batch jobs that kill every worker which begins them, among others: only they may fail, and no person notices.

They kill at one of several tokens, or when their prompt is read.
"""

from __future__ import annotations

import asyncio
import math
import time

from ops.chaos import aftermath
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.poisoned_worker import DEADLY_TEXT, POISON_SEED
from ops.chaos.scenarios.batch import NUM_KINDS, RESULTS_TIMEOUT_S, Publisher, judge, learn_results
from ops.chaos.system import System, SystemOptions

NUM_JOBS = 48
_DEADLY_TOKENS = (0, None, 1, 9, 32, 99)
"""After how many tokens each kind of poison kills; None: as a prompt."""

_POISON_TOKENS = 140
_PAUSE_S = 4.0
_RESTART_S = 0.3
# Beside people the 32 tokens of a trial take minutes.
_BESIDE_PEOPLE_S = 60.0
# A job is delivered again ten seconds after the death of its worker, six times and more.
_GIVEN_UP_S = 3 * RESULTS_TIMEOUT_S
_OPTIONS = SystemOptions(num_workers=3, simulate_ms=5.0, worker_module="ops.chaos.poisoned_worker")


async def poison(num_requests: int | None) -> Outcome:
    """Eight jobs and a poisonous one every four seconds, beside people; `num_requests` are the jobs that are none."""
    outcome = Outcome("batch-poison", "0 neighbours failed, poison said to be")
    async with System(_OPTIONS) as system:
        load = Load(system, [*plain_bodies(300, 4), *plain_bodies(5, 4), *mixed_bodies(40, 8)])
        await load.learn_references()
        publisher = Publisher(system)
        await publisher.start()
        expected = await learn_results(publisher)
        supervising = asyncio.create_task(system.supervise(_RESTART_S))
        loading = asyncio.create_task(load.run(1_000_000, 8))
        began = time.monotonic()
        poisons, jobs = [], []
        for number in range(math.ceil((num_requests or NUM_JOBS) / NUM_KINDS)):
            poisons.append(f"poison-{number}")
            await _publish_poison(publisher, poisons[-1], _DEADLY_TOKENS[number % len(_DEADLY_TOKENS)])
            for kind in range(NUM_KINDS):
                jobs.append(f"job-{number}-{kind}")
                await publisher.publish_surely(jobs[-1], kind)
            await asyncio.sleep(_PAUSE_S)
        await asyncio.sleep(_BESIDE_PEOPLE_S)
        load.stop()
        await loading
        ended = time.monotonic()
        given_up = await publisher.results(poisons, _GIVEN_UP_S)
        judge(outcome, jobs, await publisher.results(jobs, RESULTS_TIMEOUT_S), expected)
        told = [result.get("error") or "" for result in given_up.values() if result["finish"] == "failed"]
        outcome.expect(
            sum("given up" in error for error in told) == len(poisons), f"the poisonous jobs are told {told}"
        )
        outcome.count(load.ledger, [(began, ended)])
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        outcome.figures |= {"poisons": len(poisons), "worker deaths": sum(part.num_exits for part in system.workers)}
        await aftermath.check(system, load, outcome)
        await publisher.die()
    return outcome


async def _publish_poison(publisher: Publisher, job_id: str, deadly_token: int | None) -> None:
    if deadly_token is None:
        await publisher.publish_surely(job_id, 0, text=DEADLY_TEXT)
    else:
        await publisher.publish_surely(job_id, POISON_SEED + deadly_token, _POISON_TOKENS)
