"""Requests and jobs that kill every worker that takes them, and jobs while everything around them dies.

Only what kills may fail: at its first token, as a job also at a later one, or when its prompt is read. Each other job
has one result, and it is the right one.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from ops.chaos import aftermath
from ops.chaos.faults import Drain, Fault, FaultLog, Freeze, Kill
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.poisoned_worker import DEADLY_TEXT, POISON_SEED
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, MODEL, System, SystemOptions

TENANT = "default"
NUM_KINDS = 8
JOB_TOKENS = 60
RESULTS_TIMEOUT_S = 120.0
_JOB_OPTIONS = SystemOptions(num_workers=2, worker={"max_num_seqs": 32})
_KILLS: tuple[Fault, ...] = (
    Kill(1.0, 0.5, "worker-0"),
    Kill(4.0, 0.5, "nats"),
    Kill(8.0, 0.5, "worker-1"),
    Drain(11.0, 0.2, "worker-0"),
    Freeze(14.0, 3.0, ("worker-1",)),
    Kill(18.0, 0.5, "gateway-0"),
)
NUM_NEIGHBOURS = 40
NUM_JOBS = 48
# They kill after 0, 1, 9, 32 or 99 tokens, and one as a prompt.
_POISONS: list[dict[str, Any]] = [{"seed": POISON_SEED + number, "num_tokens": 140} for number in (0, 1, 9, 32, 99)]
_POISONS.insert(1, {"seed": 0, "text": DEADLY_TEXT})
_PAUSE_S = 4.0
_RESTART_S = 0.3
# Beside interactive requests the 32 tokens of a trial take minutes.
_BESIDE_PEOPLE_S = 60.0
# A job is delivered again ten seconds after the death of its worker, six times and more.
_GIVEN_UP_S = 3 * RESULTS_TIMEOUT_S
_OPTIONS = SystemOptions(num_workers=3, simulate_ms=5.0, worker_module="ops.chaos.poisoned_worker")


class Publisher:
    """A batch publisher with nothing but nats-py: it repeats a publication until it is acknowledged, under one id.

    Attributes:
        published: Ids that NATS acknowledged.
        live: How often each result was heard live on its subject.
    """

    def __init__(self, system: System) -> None:
        self.published: list[str] = []
        self.live: Counter[str] = Counter()
        self._url = system.role_url("batch")
        self._client: Client | None = None

    async def __aenter__(self) -> Publisher:
        self._client = await nats.connect(
            self._url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_ignore, allow_reconnect=True
        )
        await self._client.subscribe(f"hr.result.{TENANT}.*", cb=self._hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None
        await self._client.close()

    async def publish(self, job_id: str, seed: int, num_tokens: int = JOB_TOKENS, text: str = "job ") -> bool:
        """Publish a job once; whether NATS has acknowledged it."""
        sampling = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "temperature": 1.0}
        job = {"id": job_id, "model": MODEL, "tenant": TENANT, "lane": "batch", "text": text, "sampling": sampling}
        assert self._client is not None
        try:
            js = self._client.jetstream(timeout=2.0)
            await js.publish(f"hr.req.{MODEL}.batch.{TENANT}", json.dumps(job).encode())
        except (NatsError, JetStreamError, OSError):
            return False
        self.published.append(job_id)
        return True

    async def publish_surely(self, job_id: str, seed: int, **fields: Any) -> None:
        """Publish a job, again and again until it is acknowledged."""
        while not await self.publish(job_id, seed, **fields):  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def results(self, job_ids: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Return the stored results of these jobs that are there within a time."""
        assert self._client is not None
        found: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(job_ids) and time.monotonic() < deadline:
            for job_id in [job_id for job_id in job_ids if job_id not in found]:
                try:
                    subject = f"hr.result.{TENANT}.{job_id.replace('_', '_5f')}"
                    message = await self._client.jetstream(timeout=2.0).get_last_msg("HR_RESULTS", subject, direct=True)
                except NotFoundError:
                    continue
                except (NatsError, JetStreamError, OSError):
                    break  # NATS is away
                found[job_id] = json.loads(message.data or b"{}")
            await asyncio.sleep(0.2)
        return found

    async def _hear(self, message: Msg) -> None:
        self.live[message.subject.rpartition(".")[2]] += 1


async def kills(num_requests: int | None) -> Outcome:
    """Jobs are published while workers, NATS and a gateway die under a load; every job has one right result."""
    outcome = Outcome("batch-kills", "one right result each")
    async with System(_JOB_OPTIONS) as system, Publisher(system) as publisher:
        load = Load(system, plain_bodies(60, 4))
        await load.learn_references()
        expected = await learn_results(publisher)
        log = FaultLog()
        number = num_requests or 300
        async with load.going_on(4):
            faults = asyncio.create_task(log.run(system, _KILLS))
            for index in range(number):
                await publisher.publish_surely(f"job-{index}", index % NUM_KINDS)
                await asyncio.sleep(15.0 / number)
            await faults
        job_ids = [f"job-{index}" for index in range(number)]
        judge(outcome, job_ids, await publisher.results(job_ids, RESULTS_TIMEOUT_S), expected)
        twice = [job_id for job_id, count in publisher.live.items() if count > 1]
        outcome.figures["live results told twice"] = len(twice)
        outcome.count(load.ledger, log.windows)
        await aftermath.check(system, load, outcome, queue_timeout_s=aftermath.DEAD_GATEWAY_TIMEOUT_S)
    return outcome


async def learn_results(publisher: Publisher) -> dict[int, dict[str, Any]]:
    """Return the undisturbed result of each kind of job."""
    job_ids = [f"undisturbed-{kind}" for kind in range(NUM_KINDS)]
    async with asyncio.timeout(30.0):
        for kind, job_id in enumerate(job_ids):
            await publisher.publish_surely(job_id, kind)
    results = await publisher.results(job_ids, 30.0)
    return {kind: results[job_id] for kind, job_id in enumerate(job_ids)}


def judge(
    outcome: Outcome, job_ids: Sequence[str], results: dict[str, dict[str, Any]], expected: dict[int, dict[str, Any]]
) -> None:
    """Compare each job's result with the undisturbed one of its kind; the kind is the job's number modulo all kinds."""
    outcome.num_requests += len(job_ids)
    missing = [job_id for job_id in job_ids if job_id not in results]
    outcome.num_failed += len(missing)
    outcome.expect(not missing, f"{len(missing)} jobs have no result: {missing[:5]}")
    for job_id, result in results.items():
        reference = expected[int(job_id.rpartition("-")[2]) % NUM_KINDS]
        names = ("text", "finish", "token_ids", "completion_tokens", "error")
        if any(result.get(name) != reference.get(name) for name in names):
            outcome.num_wrong += 1
            outcome.expect(outcome.num_wrong > 3, f"{job_id}: {str(result)[:300]}")
    outcome.figures["most attempts"] = max((result.get("attempt", 1) for result in results.values()), default=0)


async def _ignore(error: Exception) -> None:
    """NATS is killed on purpose; unacknowledged requests are published again."""


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
                verdict = entry.judge(None)
                is_told = verdict is Verdict.FAILED and bool(entry.request_id) and entry.status in (200, 500, 502)
                problem = f"the poisonous request is {verdict.value}: status {entry.status}, {entry.error}"
                outcome.expect(is_told, problem)
                outcome.figures["poison's error"] = entry.error
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
                    await publisher.publish_surely(poisons[-1], **_POISONS[number % len(_POISONS)])
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
        outcome.expect(num_told == len(poisons), f"the poisonous jobs end with the errors {told}")
        outcome.count(load.ledger, [(began, ended)])
        outcome.figures |= {"poisons": len(poisons), "worker deaths": sum(part.num_exits for part in system.workers)}
        await aftermath.check(system, load, outcome)
    return outcome
