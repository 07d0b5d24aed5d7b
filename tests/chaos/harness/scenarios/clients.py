"""Clients that leave early, never read, or come in far greater numbers than can be served."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import replace

from tests.chaos.harness import aftermath
from tests.chaos.harness.fault_proxy import LinkState
from tests.chaos.harness.ledger import Entry, Verdict
from tests.chaos.harness.load import Load
from tests.chaos.harness.mix import Body, plain_bodies
from tests.chaos.harness.outcome import Outcome, percentile
from tests.chaos.harness.scenarios.gateway_deaths import has_all_slots
from tests.chaos.harness.stream_client import ask
from tests.chaos.harness.system import API_KEY, MAX_CONCURRENT, System, SystemOptions

_SLOT_CHECKS = 10
_OPEN_PER_S = 200.0


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
            await _set_redis_links(system, LinkState.SLOW)
            await asyncio.wait([loading], timeout=1.0)
            await _set_redis_links(system, LinkState.WHOLE)
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
    """A hundred clients ask for much and read nothing; their neighbours must not notice."""
    outcome = Outcome("never-readers", "0 neighbours failed, memory back")
    options = SystemOptions(num_workers=1, simulate_ms=2.0, gateway={"send_timeout_s": 4, "stream_buffer_bytes": 65536})
    async with System(options) as system:
        load = Load(system, plain_bodies(200, 8))
        await load.learn_references()
        loading = asyncio.create_task(load.run(1_000_000, 8))
        before = system.gateways[0].rss_bytes
        began = time.monotonic()
        deaf = [replace(body, is_reading=False) for body in plain_bodies(1900, num_requests or 100)]
        deaf = [Body(body.path, body.json | {"logprobs": 5}, is_reading=False) for body in deaf]
        entries = [Entry(0, "gateway-0", began) for _ in deaf]
        port = system.port("gateway-0")
        await asyncio.gather(
            *(ask(body, port, API_KEY, entry, 20.0) for body, entry in zip(deaf, entries, strict=True))
        )
        load.stop()
        await loading
        outcome.count(load.ledger, [(began, time.monotonic())])
        await aftermath.check(system, load, outcome)
        grown = system.gateways[0].rss_bytes - before
        outcome.figures["gateway grew by MB"] = round(grown / 1e6, 1)
        outcome.expect(grown < 64e6, f"the gateway kept {grown / 1e6:.0f} MB")
    return outcome


async def overload(num_requests: int | None) -> Outcome:
    """Ten times as many requests as can be served: those admitted are as many as without the overload."""
    outcome = Outcome("overload-10x", "goodput >= 95 %")
    options = SystemOptions(num_workers=1, worker={"max_num_seqs": 8}, gateway={"interactive_ttft_slo_s": 2})
    async with System(options) as system:
        load = Load(system, plain_bodies(40, 8))
        await load.learn_references()
        capacity = await _tokens_per_s(Load(system, plain_bodies(40, 8)), concurrency=12, rate_per_s=None)
        crowd = Load(system, plain_bodies(40, 8))
        crowd.ledger.references = load.ledger.references
        goodput = await _tokens_per_s(crowd, concurrency=0, rate_per_s=10 * capacity / 40)
        outcome.count(crowd.ledger, [])
        outcome.figures |= {"capacity tokens/s": round(capacity), "goodput": round(goodput / capacity, 3)}
        outcome.expect(goodput >= 0.95 * capacity, f"goodput was {goodput / capacity:.1%} of the capacity")
        firsts = [e.first_at - e.sent_at for e in crowd.ledger.entries if e.first_at is not None]
        outcome.figures["TTFT p50/p99 s"] = (percentile(firsts, 0.5), percentile(firsts, 0.99))
        await aftermath.check(system, crowd, outcome)
    return outcome


async def _tokens_per_s(load: Load, concurrency: int, rate_per_s: float | None, span_s: float = 12.0) -> float:
    """Return the tokens per second of right answers that ended within a span that begins when the load is steady."""
    running = (
        asyncio.create_task(load.run(1_000_000, concurrency))
        if rate_per_s is None
        else asyncio.create_task(load.run_open(rate_per_s, span_s + 3.0))
    )
    await asyncio.sleep(3.0)
    start = time.monotonic()
    await asyncio.sleep(span_s)
    end = time.monotonic()
    load.stop()
    await running
    ended = [
        entry.completion_tokens or 0
        for entry in load.ledger.entries
        if load.ledger.verdict(entry) is Verdict.OK and entry.ended_at is not None and start < entry.ended_at <= end
    ]
    return sum(ended) / (end - start)


async def idle_streams(num_requests: int | None) -> Outcome:
    """Thousands of streams that are open and say almost nothing."""
    number = num_requests or 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    outcome = Outcome("idle-streams", "<= 20 KB each")
    many = {"max_connections": 2 * number, "max_streams": 2 * number, "max_queued_requests": 2 * number}
    options = SystemOptions(
        num_workers=2,
        simulate_ms=3000.0,
        worker={"simulate_growth": 0, "max_num_seqs": 8192, "num_blocks": 200_000, "max_num_batched_tokens": 16384},
        gateway={**many, "max_queued_tokens": 100_000_000, "interactive_ttft_slo_s": 600},
    )
    async with System(options) as system:
        gateway = system.gateways[0]
        await asyncio.sleep(1.0)
        before = gateway.rss_bytes
        load = Load(system, plain_bodies(1900, 1), timeout_s=600.0)
        opening = asyncio.create_task(load.run_open(_OPEN_PER_S, number / _OPEN_PER_S))
        deadline = time.monotonic() + 120.0
        while load.num_open < number and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        await asyncio.sleep(4.0)
        each = (gateway.rss_bytes - before) / max(1, load.num_open)
        outcome.num_requests = load.num_open
        outcome.figures["bytes a stream"] = round(each)
        outcome.expect(load.num_open == number, f"only {load.num_open} of {number} streams were open")
        outcome.expect(each <= 20_000, f"{each:.0f} bytes a stream")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return outcome


async def _set_redis_links(system: System, state: LinkState) -> None:
    for (_, server), link in system.links.items():
        if server == "redis":
            await link.set(state)
