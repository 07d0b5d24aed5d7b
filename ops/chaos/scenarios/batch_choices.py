"""Batch jobs of several sequences (`n`, `best_of`) while workers and the gateway are killed: each has one right answer.

The demo model itself runs, because which sequences are the best depends on the log probabilities of real tokens, summed
up over all attempts of a job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from gateway.batches.line import BatchLine, output_line, read_openai_line
from ops.chaos import aftermath
from ops.chaos.faults import FaultLog, Kill
from ops.chaos.load import Load
from ops.chaos.mix import Body
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios.batch import RESULTS_TIMEOUT_S, TENANT, Publisher
from ops.chaos.system import MODEL, System, SystemOptions
from shared.messages import BatchResult

NUM_LINES = 60
SPAN_S = 15.0
# While both workers are dead all requests wait until one has loaded the model.
WAIT_S = 120.0
_NUM_TOKENS = 48
# Few at a time: a worker that is killed holds some and has left others in the queue.
_OPTIONS = SystemOptions(
    num_workers=2, simulate_ms=None, worker={"num_blocks": 600, "dtype": "float32", "max_num_seqs": 4}
)
# One after the other, when the last one has started again, which takes seconds with a model.
_KILLS: tuple[tuple[str, ...], ...] = (
    ("worker-0",),
    ("gateway-0",),
    ("worker-1",),
    ("worker-0", "worker-1"),
    ("gateway-0", "worker-1"),
)
_KINDS: tuple[dict[str, Any], ...] = (
    {"n": 1},
    {"n": 3},
    {"n": 1, "best_of": 4},
    {"n": 2, "best_of": 3, "top_p": 0.9},
    {"n": 2, "best_of": 2, "stop": ["ret"]},
)


async def kills(num_requests: int | None) -> Outcome:
    """Lines of OpenAI's Batch API are published while all that answers them is killed, under a load of the same."""
    outcome = Outcome("batch-choices", "one right answer each")
    async with System(_OPTIONS) as system, Publisher(system) as publisher:
        bodies = [Body("/v1/completions", _body(kind)) for kind in range(len(_KINDS))]
        load = Load(system, bodies, timeout_s=WAIT_S)
        await load.learn_references()
        undisturbed = {kind: _line(f"undisturbed-{kind}", kind) for kind in range(len(_KINDS))}
        await _publish([*undisturbed.values()], publisher, 0.0)
        await _collect([*undisturbed.values()], publisher)
        log = FaultLog()
        lines = [_line(f"line-{number}", number % len(_KINDS)) for number in range(num_requests or NUM_LINES)]
        async with load.going_on(2):
            killing = asyncio.create_task(_kill_in_turn(system, log))
            await _publish(lines, publisher, SPAN_S)
            await killing
        await _collect(lines, publisher)
        _judge(outcome, lines, undisturbed)
        _count(outcome, lines, publisher.live)
        outcome.count(load.ledger, log.windows)
        await aftermath.check(system, load, outcome, queue_timeout_s=aftermath.DEAD_GATEWAY_TIMEOUT_S)
    return outcome


async def _kill_in_turn(system: System, log: FaultLog) -> None:
    for names in _KILLS:
        await asyncio.sleep(1.0)
        await log.run(system, [Kill(0.0, 0.5, name) for name in names])


def _body(kind: int) -> dict[str, Any]:
    fixed = {"model": MODEL, "prompt": "def list_files(path):", "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    return {**fixed, "temperature": 1.0, "seed": 100 * kind, **_KINDS[kind]}


def _line(custom_id: str, kind: int) -> BatchLine:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": _body(kind)}
    return read_openai_line(fields, TENANT, f"batch-{custom_id}")


async def _publish(lines: list[BatchLine], publisher: Publisher, span_s: float) -> None:
    for line in lines:
        for request in line.requests:
            while not await publisher.publish_encoded(request.id, msgspec.msgpack.encode(request)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await asyncio.sleep(span_s / len(lines))


async def _collect(lines: list[BatchLine], publisher: Publisher) -> None:
    job_ids = [request.id for line in lines for request in line.requests]
    found = await publisher.results(job_ids, RESULTS_TIMEOUT_S)
    for line in lines:
        line.results |= {
            request.id: msgspec.convert(found[request.id], BatchResult)
            for request in line.requests
            if request.id in found
        }


def _judge(outcome: Outcome, lines: list[BatchLine], undisturbed: dict[int, BatchLine]) -> None:
    """Compare the answer of each line, as `headrace publish` tells it, with the undisturbed one of its kind."""
    expected = {kind: _told(line) for kind, line in undisturbed.items()}
    for number, line in enumerate(lines):
        outcome.num_requests += 1
        if not line.is_complete:
            outcome.num_failed += 1
            missing = len(line.requests) - len(line.results)
            outcome.problems.append(f"{line.custom_id} lacks {missing} of {len(line.requests)} results")
        elif _told(line) != expected[number % len(_KINDS)]:
            outcome.num_wrong += 1
            outcome.problems.append(f"{line.custom_id} is another answer: {str(_told(line))[:300]}")


def _told(line: BatchLine) -> tuple[Any, ...]:
    response = output_line(line)["response"]
    if response is None or response["status_code"] != 200:
        return (output_line(line),)
    return response["body"]["choices"], response["body"]["usage"]["completion_tokens"]


def _count(outcome: Outcome, lines: list[BatchLine], live: Counter[str]) -> None:
    """Each result is stored, and told live, once. Several attempts show that a worker was killed over one."""
    results = [result for line in lines for result in line.results.values()]
    twice = [job_id for job_id, count in live.items() if count > 1]
    num_moved = sum(result.attempt > 1 for result in results)
    outcome.figures |= {"results": len(results), "of a later attempt": num_moved, "told twice": len(twice)}
    outcome.expect(not twice, f"{len(twice)} results were told more than once: {twice[:3]}")
    outcome.expect(bool(num_moved), "no worker held a job when it was killed: nothing was shown")
