"""Requests and jobs that kill every worker that takes them: they alone may fail, and their neighbours notice nothing.

Jobs kill at one of several tokens, or when their prompt is read.
"""

from __future__ import annotations

import asyncio
import math
import time

from ops.chaos import aftermath
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.poisoned_worker import DEADLY_TEXT, POISON_SEED
from ops.chaos.scenarios.batch import NUM_KINDS, RESULTS_TIMEOUT_S, Publisher, judge, learn_results
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System, SystemOptions

NUM_NEIGHBOURS = 40
NUM_JOBS = 48
_DEADLY_TOKENS = (0, None, 1, 9, 32, 99)
"""After how many tokens each kind of poisonous job kills; None: as a prompt."""

_POISON_TOKENS = 140
_PAUSE_S = 4.0
_RESTART_S = 0.3
# Beside interactive requests the 32 tokens of a trial take minutes.
_BESIDE_PEOPLE_S = 60.0
# A job is delivered again ten seconds after the death of its worker, six times and more.
_GIVEN_UP_S = 3 * RESULTS_TIMEOUT_S
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
        windows, ended_after_s = [], []
        async with system.supervised(_RESTART_S):
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


async def batch_poison(num_requests: int | None) -> Outcome:
    """Eight jobs and a poisonous one every four seconds, beside interactive requests; `num_requests` are the former."""
    outcome = Outcome("batch-poison", "0 neighbours failed, poison said to be")
    async with System(_OPTIONS) as system, Publisher(system) as publisher:
        load = Load(system, [*plain_bodies(300, 4), *plain_bodies(5, 4), *mixed_bodies(40, 8)])
        await load.learn_references()
        expected = await learn_results(publisher)
        began = time.monotonic()
        poisons, jobs = [], []
        async with system.supervised(_RESTART_S):
            async with load.going_on(8):
                for number in range(math.ceil((num_requests or NUM_JOBS) / NUM_KINDS)):
                    poisons.append(f"poison-{number}")
                    await _publish_poison(publisher, poisons[-1], _DEADLY_TOKENS[number % len(_DEADLY_TOKENS)])
                    for kind in range(NUM_KINDS):
                        jobs.append(f"job-{number}-{kind}")
                        await publisher.publish_surely(jobs[-1], kind)
                    await asyncio.sleep(_PAUSE_S)
                await asyncio.sleep(_BESIDE_PEOPLE_S)
            ended = time.monotonic()
            given_up = await publisher.results(poisons, _GIVEN_UP_S)
            judge(outcome, jobs, await publisher.results(jobs, RESULTS_TIMEOUT_S), expected)
        told = [result.get("error") or "" for result in given_up.values() if result["finish"] == "failed"]
        num_told = sum("given up" in error for error in told)
        outcome.expect(num_told == len(poisons), f"the poisonous jobs are told {told}")
        outcome.count(load.ledger, [(began, ended)])
        outcome.figures |= {"poisons": len(poisons), "worker deaths": sum(part.num_exits for part in system.workers)}
        await aftermath.check(system, load, outcome)
    return outcome


async def _publish_poison(publisher: Publisher, job_id: str, deadly_token: int | None) -> None:
    if deadly_token is None:
        await publisher.publish_surely(job_id, 0, text=DEADLY_TEXT)
    else:
        await publisher.publish_surely(job_id, POISON_SEED + deadly_token, _POISON_TOKENS)
