"""Tenants beside each other: greedy keys and long queues take nothing from a polite key, nor jobs from a person."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from gateway.admission.api_keys import create_key
from ops.chaos import aftermath
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import Body, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios.poison import TENANT, Publisher
from ops.chaos.stream_client import ask, request_bytes
from ops.chaos.system import MODEL, System, SystemOptions
from shared.streams import INTERACTIVE_STREAM

_KEYS_READ_S = 2.5
# Differences of this size come from the machine, not from a tenant.
_KEYS_TOLERANCE_S, _LANES_TOLERANCE_S = 0.02, 0.03
_REQUESTS_EACH = 4
_CHOICES_EACH = 128
_MAX_SILENCE_S = 1.0
_NUM_PROMPTS = 1000
_PROMPT_WORDS = 200
_STEP_TOKENS = 512
_LONGEST_FIRST_S = 3.0
_ALL_QUEUED_S = 15.0
# The simulated worker's: 6 ms, and 0.5 % more for each further token.
_LONG_STEP_S = 0.006 * (1 + 0.005 * (_STEP_TOKENS - 1))
_NUM_JOBS = 1000
_JOB_TOKENS = 1500
_TIMEOUT_S = 60.0
_TEXT_EVENT = "response.output_text.delta"
_OPTIONS = SystemOptions(num_workers=1, simulate_ms=6.0)


async def greedy_keys(num_requests: int | None) -> Outcome:
    """Four keys with four requests of 128 choices each; a polite key's first tokens come as beside one such key."""
    number = min(num_requests or 40, 40)
    outcome = Outcome("greedy-keys", "TTFT <= 2x that beside one, no silence above 1 s")
    # Each key asks for far more sequences than the worker has slots.
    fields = {"n": _CHOICES_EACH, "prompt": "x", "max_tokens": 1900}
    async with _polite_key(_OPTIONS, 4) as (system, load, greedy):
        medians = []
        for keys in (greedy[:1], greedy):
            asked = [(key, fields | {"seed": seed}) for key in keys for seed in range(_REQUESTS_EACH)]
            async with _asked_meanwhile(system, asked):
                medians.append(statistics.median(await _seconds_to_first_tokens(load, number, outcome)))
        outcome.figures["TTFT p50 beside one and four keys s"] = [round(median, 4) for median in medians]
        outcome.expect(medians[1] <= 2 * medians[0] + _KEYS_TOLERANCE_S, f"TTFT was {medians[1] / medians[0]:.1f}x")
        longest = max(outcome.silences_s)
        outcome.expect(longest <= _MAX_SILENCE_S + load.max_lag_s, f"a stream was silent for {longest:.1f} s")
        await aftermath.check(system, load, outcome)
    return outcome


async def long_prompts(num_requests: int | None) -> Outcome:
    """Another key's first tokens alone and beside 1,000 long prompts of one key, in turns: two steps later at most."""
    number = min(num_requests or 40, 40) // 2
    outcome = Outcome("long-prompts", "TTFT <= 1.5x that alone and two steps, none refused")
    options = replace(
        _OPTIONS, gateway={"interactive_ttft_slo_s": 600.0}, worker={"max_num_batched_tokens": _STEP_TOKENS}
    )
    # None begins as another.
    prompts = (f"{number} " + "x = 1; " * _PROMPT_WORDS for number in range(_NUM_PROMPTS))
    fields = [{"prompt": prompt, "max_tokens": 8, "timeout": _TIMEOUT_S * 10} for prompt in prompts]
    async with _polite_key(options, 1) as (system, load, (greedy,)):
        asked = [(greedy, each) for each in fields]
        firsts: dict[bool, list[float]] = {False: [], True: []}
        for is_beside in (False, True, False, True):
            async with _asked_meanwhile(system, asked) if is_beside else nullcontext():
                firsts[is_beside] += await _seconds_to_first_tokens(load, number, outcome)
        alone, beside = (statistics.median(firsts[each]) for each in (False, True))
        outcome.figures["TTFT p50 alone and beside 1,000 long prompts s"] = [round(alone, 4), round(beside, 4)]
        longest = max(firsts[True])
        outcome.figures["longest TTFT beside them s"] = round(longest, 2)
        outcome.expect(longest <= _LONGEST_FIRST_S + load.max_lag_s, f"one first token took {longest:.1f} s")
        outcome.expect(beside <= 1.5 * alone + 2 * _LONG_STEP_S + _KEYS_TOLERANCE_S, f"TTFT was {beside / alone:.1f}x")
        await aftermath.check(system, load, outcome)
    return outcome


@asynccontextmanager
async def _polite_key(options: SystemOptions, num_greedy: int) -> AsyncIterator[tuple[System, Load, list[str]]]:
    """Start a system; yield it with the load of a polite key, whose references it has, and greedy keys."""
    async with System(options) as system:
        polite, *greedy = (create_key(system.keys_file, tenant=f"tenant-{n}")[1] for n in range(num_greedy + 1))
        await asyncio.sleep(_KEYS_READ_S)
        load = Load(system, plain_bodies(30, 8), key=polite)
        await load.learn_references()
        yield system, load, greedy


async def _seconds_to_first_tokens(polite: Load, number: int, outcome: Outcome) -> list[float]:
    """Ask as the polite key does, one request after the other, at random moments of steps; none may be refused."""
    load = polite.fresh()
    began = time.monotonic()
    for _ in range(number):
        await asyncio.sleep(random.uniform(0.0, 2 * _LONG_STEP_S))
        await load.run(1, 1)
    polite.max_lag_s = max(polite.max_lag_s, load.max_lag_s)
    outcome.count(load.ledger, [(began, time.monotonic())])
    refused = load.ledger.verdicts()[Verdict.REFUSED]
    outcome.expect(not refused, f"{refused} requests of the polite key were refused")
    return [each.first_at - each.sent_at for each in load.ledger.entries if each.first_at is not None]


@asynccontextmanager
async def _asked_meanwhile(system: System, asked: Sequence[tuple[str, dict[str, Any]]]) -> AsyncIterator[None]:
    """Ask for completions, each with a key, and leave when the block ends."""
    port, common = system.port("gateway-0"), {"model": MODEL, "ignore_eos": True, "stream": True}
    bodies = [(key, Body("/v1/completions", common | fields)) for key, fields in asked]
    asking = [
        asyncio.create_task(ask(body, port, key, Entry(0, "gateway-0", time.monotonic()), 600.0))
        for key, body in bodies
    ]
    await asyncio.sleep(1.0)
    # All wait or have been answered: reading many long prompts takes the gateway a while.
    began = time.monotonic()
    while time.monotonic() < began + _ALL_QUEUED_S:
        num_queued = (await system.observer.num_queued()).get(INTERACTIVE_STREAM, 0)
        if num_queued + sum(task.done() for task in asking) >= len(asking):
            break
        await asyncio.sleep(0.1)
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    """When the first text of a response came, in seconds after it was asked for; its text, and its last event."""

    first_s: float
    text: str
    last: str


async def background(num_requests: int | None) -> Outcome:
    """Background and interactive responses in turn: on an idle fleet, and beside a backlog of their tenant's jobs."""
    number = min(num_requests or 30, 30)
    outcome = Outcome("background", "first text <= 2x an interactive one's, idle and beside 1,000 jobs")
    async with System(_OPTIONS) as system:
        key = create_key(system.keys_file, tenant=TENANT)[1]
        await asyncio.sleep(_KEYS_READ_S)
        port = system.port("gateway-0")
        expected = await _ask(port, key, False)
        await _compare(outcome, "idle", port, key, number, expected.text)
        async with Publisher(system) as publisher:
            for index in range(_NUM_JOBS):
                await publisher.publish(f"job-{index}", index, _JOB_TOKENS)
            outcome.expect(len(publisher.published) == _NUM_JOBS, f"{len(publisher.published)} jobs were taken")
            await _compare(outcome, f"beside {_NUM_JOBS} jobs", port, key, number, expected.text)
    return outcome


async def _compare(outcome: Outcome, where: str, port: int, key: str, number: int, text: str) -> None:
    """Ask for `number` of both kinds, one after the other, and record broken promises."""
    medians = {}
    for is_background in (False, True):
        answers = [await _ask(port, key, is_background) for _ in range(number)]
        outcome.num_requests += number
        outcome.num_failed += sum(answer.last != "response.incomplete" for answer in answers)
        outcome.num_wrong += sum(answer.text != text for answer in answers)
        medians[is_background] = statistics.median(answer.first_s for answer in answers)
    outcome.figures[f"first text p50 {where}, interactive and background s"] = [
        round(medians[is_background], 4) for is_background in (False, True)
    ]
    is_kept = medians[True] <= 2 * medians[False] + _LANES_TOLERANCE_S
    outcome.expect(is_kept, f"{where}: the first text took {medians[True] / medians[False]:.1f}x an interactive one's")
    outcome.expect(not outcome.num_failed, f"{where}: {outcome.num_failed} failed")
    outcome.expect(not outcome.num_wrong, f"{where}: {outcome.num_wrong} have another text")


async def _ask(port: int, key: str, is_background: bool) -> _Answer:
    """Stream one response to its end."""
    body = {"model": MODEL, "input": "x", "max_output_tokens": 60, "temperature": 0, "ignore_eos": True}
    asked = request_bytes(
        "/v1/responses", body | {"stream": True, "background": is_background}, key, "Connection: close"
    )
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began, first_s, text, last = time.monotonic(), float("inf"), "", ""
        writer.write(asked)
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            last = event["type"]
            if last == _TEXT_EVENT:
                first_s = min(first_s, time.monotonic() - began)
                text += event["delta"]
        writer.close()
    return _Answer(first_s, text, last)
