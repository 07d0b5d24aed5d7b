"""Clients that leave early, never read, or come in far greater numbers than can be served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ops.chaos import aftermath
from ops.chaos.fault_proxy import LinkState
from ops.chaos.ledger import Entry, Ledger, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, plain_bodies
from ops.chaos.outcome import Outcome, percentile
from ops.chaos.scenarios.deaths import has_all_slots
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, MAX_CONCURRENT, Seen, System, SystemOptions

_SLOT_CHECKS = 10
_NUM_SLOTS = 8
_TOKENS = 40
_SPAN_S = 12.0


async def aborts(num_requests: int | None) -> Outcome:
    """Clients of a key with limited slots leave before, during and after the first output; Redis answers late."""
    outcome = Outcome("aborts", "0 slots, blocks or sequences leaked")
    options = SystemOptions(num_workers=1, simulate_ms=5.0, has_faulty_links=True)
    async with System(options) as system:
        load = Load(system, plain_bodies(20, 2), key=system.limited_key)
        await load.learn_references()
        bodies = [replace(body, abort_after=after) for body in plain_bodies(400, 4) for after in (0, 1, 2)]
        leaving = Load(system, bodies, key=system.limited_key, pause_s=0.005)
        loading = asyncio.create_task(leaving.run(num_requests or 3000, MAX_CONCURRENT - 4))
        while not loading.done():
            await system.set_links(LinkState.SLOW, "redis")
            await asyncio.wait([loading], timeout=1.0)
            await system.set_links(LinkState.WHOLE, "redis")
            await asyncio.wait([loading], timeout=1.0)
        await loading
        outcome.count(leaving.ledger, [])
        tries = 0
        while not await has_all_slots(system) and tries < _SLOT_CHECKS:
            tries += 1
            await asyncio.sleep(0.5)
        outcome.expect(tries < _SLOT_CHECKS, "slots of the key were not free 5 s after the last client had left")
        await aftermath.check(system, load, outcome)
    return outcome


async def never_readers(num_requests: int | None) -> Outcome:
    """A hundred clients ask for long answers and read nothing; their neighbours must not notice."""
    outcome = Outcome("never-readers", "0 neighbours failed, memory back")
    options = SystemOptions(num_workers=1, simulate_ms=2.0, gateway={"send_timeout_s": 4, "stream_buffer_bytes": 65536})
    async with System(options) as system:
        load = Load(system, plain_bodies(200, 8))
        await load.learn_references()
        began = time.monotonic()
        port = system.port("gateway-0")
        async with load.going_on(8), asyncio.TaskGroup() as asking:
            before = system.gateways[0].rss_bytes
            for body in plain_bodies(1900, num_requests or 100):
                never_read = Body(body.path, body.json | {"logprobs": 5}, is_reading=False)
                asking.create_task(ask(never_read, port, API_KEY, Entry(0, "gateway-0", began), 20.0))
        outcome.count(load.ledger, [(began, time.monotonic())])
        await aftermath.check(system, load, outcome)
        grown = system.gateways[0].rss_bytes - before
        outcome.figures["gateway grew by MB"] = round(grown / 1e6, 1)
        outcome.expect(grown < 64e6, f"the gateway kept {grown / 1e6:.0f} MB")
    return outcome


async def overload(num_requests: int | None) -> Outcome:
    """Ten times as many requests as can be served: those admitted are as many as the worker's steps could make."""
    outcome = Outcome("overload-10x", "goodput >= 95 %")
    options = SystemOptions(num_workers=1, worker={"max_num_seqs": _NUM_SLOTS}, gateway={"interactive_ttft_slo_s": 2})
    async with System(options) as system:
        usual = Load(system, plain_bodies(_TOKENS, 8))
        await usual.learn_references()
        before = await measure(usual, system, usual.run(1_000_000, 12), _NUM_SLOTS, _SPAN_S)
        crowd = usual.fresh()
        coming = crowd.run_open(10 * before.tokens_per_s / _TOKENS, 2 * _SPAN_S)
        crowded = await measure(crowd, system, coming, _NUM_SLOTS, _SPAN_S)
        outcome.count(crowd.ledger, [])
        outcome.figures |= {
            "tokens/s before and now": [round(before.tokens_per_s), round(crowded.tokens_per_s)],
            "of the possible before and now": [round(before.share, 3), round(crowded.share, 3)],
        }
        outcome.expect(crowded.share >= 0.95, f"goodput was {crowded.share:.1%} of what the worker could do")
        firsts = [e.first_at - e.sent_at for e in crowd.ledger.entries if e.first_at is not None]
        outcome.figures["TTFT p50/p99 s"] = (percentile(firsts, 0.5), percentile(firsts, 0.99))
        await aftermath.check(system, crowd, outcome)
    return outcome


_SAMPLE_S = 0.05
_WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Tokens per second of right answers within a span, and those that the worker's own steps could have made.

    The machine is shared, so a capacity measured a minute ago need not hold; the steps show the possible rate.
    """

    tokens_per_s: float
    possible_per_s: float

    @property
    def share(self) -> float:
        """Share of the possible."""
        return self.tokens_per_s / max(1e-9, self.possible_per_s)


async def measure(
    load: Load, system: System, running: Coroutine[Any, Any, None], num_slots: int, span_s: float
) -> Goodput:
    """Run a load on one worker of `num_slots` sequences until it was measured for a span in a steady state."""
    task = asyncio.create_task(running)
    await asyncio.sleep(_WARM_UP_S)
    (name,) = system.observer.workers
    seen = [system.observer.workers[name]]
    began = time.monotonic()
    while time.monotonic() < began + span_s:
        await asyncio.sleep(_SAMPLE_S)
        if system.observer.workers[name].at > seen[-1].at:
            seen.append(system.observer.workers[name])
    ended = time.monotonic()
    load.stop()
    await task
    return Goodput(tokens_within(load.ledger, began, ended) / (ended - began), possible_per_s(seen, num_slots))


def tokens_within(ledger: Ledger, began: float, ended: float) -> float:
    """Return the tokens of right answers that came within a span, which begins and ends within answers."""
    right = [entry for entry in ledger.entries if ledger.verdict(entry) is Verdict.OK]
    return sum(_tokens_within(entry, began, ended) for entry in right)


def possible_per_s(seen: Sequence[Seen], num_slots: int) -> float:
    """Return the tokens per second of the heard worker, were all slots full in each step and no pause between steps."""
    busy = sum(each.heartbeat.running > 0 for each in seen) / len(seen)
    span_s = seen[-1].at - seen[0].at
    num_steps = seen[-1].heartbeat.step - seen[0].heartbeat.step
    return num_slots * num_steps / span_s / busy if busy and span_s else 0.0


def _tokens_within(entry: Entry, began: float, ended: float) -> float:
    """Return the part of an answer's tokens that came within a span.

    Answers that are made together end together: whether the span had one more such end or one less would count for
    one in thirty.
    """
    if entry.first_at is None or entry.last_at is None or entry.completion_tokens is None:
        return 0.0
    within_s = min(entry.last_at, ended) - max(entry.first_at, began)
    share = within_s / (entry.last_at - entry.first_at) if entry.last_at > entry.first_at else float(within_s >= 0)
    return entry.completion_tokens * max(0.0, share)
