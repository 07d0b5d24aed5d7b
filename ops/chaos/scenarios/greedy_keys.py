"""Keys that ask for all slots many times over, beside one that asks for one stream after the other."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.admission.api_keys import create_key
from ops.chaos import aftermath
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.stream_client import ask
from ops.chaos.system import MODEL, System, SystemOptions

_REQUESTS_EACH = 4
_CHOICES_EACH = 128
_KEYS_READ_S = 2.5
_MAX_SILENCE_S = 1.0
# What the machine does meanwhile is no tenant's fault.
_TOLERANCE_S = 0.02


async def greedy_keys(num_requests: int | None) -> Outcome:
    """Four keys with four requests of 128 choices each; a polite key's first tokens come as beside one such key."""
    number = min(num_requests or 40, 40)
    outcome = Outcome("greedy-keys", "TTFT <= 2x that beside one, no silence above 1 s")
    async with System(SystemOptions(num_workers=1, simulate_ms=6.0)) as system:
        polite = create_key(system.keys_file, tenant="polite")[1]
        greedy = [create_key(system.keys_file, tenant=f"greedy-{index}")[1] for index in range(4)]
        await asyncio.sleep(_KEYS_READ_S)
        load = Load(system, plain_bodies(30, 8), key=polite)
        await load.learn_references()
        medians = []
        for keys in (greedy[:1], greedy):
            async with _all_slots_wanted(system, keys):
                own = Load(system, plain_bodies(30, 8), key=polite)
                own.ledger.references = load.ledger.references
                began = time.monotonic()
                await own.run(number, 1)
            load.max_lag_s = max(load.max_lag_s, own.max_lag_s)
            outcome.count(own.ledger, [(began, time.monotonic())])
            refused = own.ledger.verdicts()[Verdict.REFUSED]
            outcome.expect(not refused, f"{refused} requests of the polite key were refused")
            firsts = [entry.first_at - entry.sent_at for entry in own.ledger.entries if entry.first_at is not None]
            medians.append(statistics.median(firsts))
        outcome.figures["TTFT p50 beside one and four keys s"] = [round(median, 4) for median in medians]
        outcome.expect(medians[1] <= 2 * medians[0] + _TOLERANCE_S, f"TTFT was {medians[1] / medians[0]:.1f}x")
        longest = max(outcome.silences_s)
        outcome.expect(longest <= _MAX_SILENCE_S + load.max_lag_s, f"a stream was silent for {longest:.1f} s")
        await aftermath.check(system, load, outcome)
    return outcome


@asynccontextmanager
async def _all_slots_wanted(system: System, keys: list[str]) -> AsyncIterator[None]:
    """Let each key ask for far more sequences than the worker has slots, until the block ends."""
    fields = {"model": MODEL, "prompt": "x", "n": _CHOICES_EACH, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    port = system.port("gateway-0")
    asking = [
        asyncio.create_task(
            ask(
                Body("/v1/completions", fields | {"seed": seed}),
                port,
                key,
                Entry(0, "gateway-0", time.monotonic()),
                600.0,
            )
        )
        for key in keys
        for seed in range(_REQUESTS_EACH)
    ]
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
