"""Background responses beside interactive ones: a person waits for both, whatever jobs their tenant has queued."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass

from gateway.admission.api_keys import create_key
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios.batch import TENANT, Publisher
from ops.chaos.stream_client import request_bytes
from ops.chaos.system import MODEL, System, SystemOptions

_NUM_JOBS = 1000
_JOB_TOKENS = 1500
_KEYS_READ_S = 2.5
_TIMEOUT_S = 60.0
# What the machine does meanwhile; two medians of a few requests each.
_TOLERANCE_S = 0.03
_TEXT_EVENT = "response.output_text.delta"


@dataclass(frozen=True, slots=True)
class _Answer:
    """When the first text of a response came, in seconds after it was asked for; its text, and its last event."""

    first_s: float
    text: str
    last: str


async def first_texts(num_requests: int | None) -> Outcome:
    """Background and interactive responses in turn: on an idle fleet, and beside a backlog of their tenant's jobs."""
    number = min(num_requests or 30, 30)
    outcome = Outcome("background", "first text <= 2x an interactive one's, idle and beside 1,000 jobs")
    async with System(SystemOptions(num_workers=1, simulate_ms=6.0)) as system:
        key = create_key(system.keys_file, tenant=TENANT)[1]
        await asyncio.sleep(_KEYS_READ_S)
        port = system.port("gateway-0")
        expected = await _ask(port, key, False)
        await _compare(outcome, "idle", port, key, number, expected.text)
        publisher = Publisher(system)
        await publisher.start()
        for index in range(_NUM_JOBS):
            await publisher.publish(f"job-{index}", index, _JOB_TOKENS)
        outcome.expect(len(publisher.published) == _NUM_JOBS, f"{len(publisher.published)} jobs were taken")
        await _compare(outcome, f"beside {_NUM_JOBS} jobs", port, key, number, expected.text)
        await publisher.die()
    return outcome


async def _compare(outcome: Outcome, where: str, port: int, key: str, number: int, text: str) -> None:
    """Ask for `number` of both kinds, one after the other, and write down what is promised and not kept."""
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
    is_kept = medians[True] <= 2 * medians[False] + _TOLERANCE_S
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
