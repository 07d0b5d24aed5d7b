"""Incident class: hostile grammars. Jobs that come to the queue without a gateway end alone, each with an error.

The worker runs in the process of the test: a grammar that ends its process ends the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.consumer.constraint_source import MAX_WAIT_S, ConstraintSource
from shared.batch_streams import batch_stream
from shared.grammar import Grammar
from shared.messages import BatchResult, Request, encode
from shared.sampling import Sampling
from shared.subjects import request_subject, result_subject
from tests.gpu_worker.consumer.harness import MakeWorker, TestGateway, wait_until

HOSTILE, VICTIM = "acme", "globex"
STREAM = Sampling(max_tokens=4000, ignore_eos=True, seed=1)


def schema(content: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(content))


def chain(length: int, link: Callable[[Any], Any], number: int) -> Grammar:
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return schema({"$defs": {**links, f"d{length}": {"const": number}}, "$ref": "#/$defs/d0"})


def _array(inner: Any) -> Any:
    return {"type": "array", "prefixItems": [inner], "items": False, "minItems": 1}


def _object(inner: Any) -> Any:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}


def _deep(number: int) -> Any:
    inner: Any = {"const": number}
    for _ in range(50):
        inner = _array(inner)
    return inner


def hostile_grammars(number: int) -> list[Grammar]:
    """Return one grammar of each kind; those of another number have other digests."""
    return [
        # References that overflow the stack of llguidance, in one chain and nested within the bounds.
        chain(990, _array, number),
        chain(95, lambda inner: {"allOf": [_deep(number), inner]}, number),
        chain(99, _object, number),
        # Lexemes whose emptiness is looked for without end.
        Grammar(
            kind="lark",
            source=f'start: A "{number}"\nA: ~/(.*a(.{{14}}))/ & ~/(.*b.{{15}})/ & /(.*c.{{16}})/ & ~/(.*d.{{17}})/',
        ),
        Grammar(
            kind="lark",
            source="start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(900 + number)) + "A"
            f'{900 + number}: "z"',
        ),
        Grammar(kind="regex", source=f"((a{{1,1000}}){{1,1000}}){{1,{number + 2}}}"),
        Grammar(kind="regex", source="(" * 240 + "a" + ")" * 240 + f"{{{number + 1}}}"),
        schema({"enum": [f"{number} {i} " + "x" * 50 for i in range(3_000)]}),
        schema({"type": "integer", "multipleOf": 9_973 + number}),
        Grammar(kind="gbnf", source="root ::= " + "(" * 200 + f'"{number}"' + ")*" * 200),
    ]


async def publish(gateway: TestGateway, count: int) -> list[str]:
    """Publish jobs of the hostile tenant straight to the queue; return their ids."""
    grammars = itertools.chain.from_iterable(map(hostile_grammars, itertools.count()))
    ids = []
    for number, grammar in enumerate(itertools.islice(grammars, count)):
        sampling = Sampling(max_tokens=2, grammar=grammar)
        job = gateway.request(
            id=f"{gateway.model}-{number}", sampling=sampling, tenant=HOSTILE, lane="batch", reply=None
        )
        await gateway.js.publish(request_subject(gateway.model, "batch", HOSTILE), encode(job))
        ids.append(job.id)
    return ids


class Stopwatch:
    """Measures silences, less the time in which this thread was ready to run and others had the processors.

    The test and the worker share the thread. What either computes or waits for counts.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._began, self._held_up = time.monotonic(), self._held_up_s()

    def lap(self) -> None:
        """End a silence; the next one begins."""
        now, held_up = time.monotonic(), self._held_up_s()
        self.longest = max(self.longest, now - self._began - (held_up - self._held_up))
        self._began, self._held_up = now, held_up

    @staticmethod
    def _held_up_s() -> float:
        try:
            return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        except OSError:
            return 0.0  # a kernel that does not count it


async def longest_silence(gateway: TestGateway, until: Callable[[], bool]) -> float:
    """Return the longest time without a token of a victim's streams, which follow each other."""
    stopwatch = Stopwatch()
    while not until():
        request = gateway.request(sampling=STREAM, tenant=VICTIM)
        answer = await gateway.publish(request)
        seen = 0
        stopwatch.lap()
        while not answer.finished.is_set() and not until():
            await asyncio.sleep(0.005)
            if len(answer.token_ids) > seen:
                seen = len(answer.token_ids)
                stopwatch.lap()
        stopwatch.lap()
        await gateway.cancel(request.id)
    return stopwatch.longest


async def result_of(gateway: TestGateway, job: str) -> BatchResult:
    message = await gateway.js.get_last_msg("HR_RESULTS", result_subject(HOSTILE, job))
    assert message.data is not None
    return msgspec.json.decode(message.data, type=BatchResult)


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_jobs_of_hostile_grammars_end_alone(
    make_worker: MakeWorker,
    gateway: TestGateway,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[str] = []
    count_given_back = ConstraintSource._count_given_back

    def note_given_back(source: ConstraintSource, request: Request) -> None:
        given_back.append(request.tenant)
        count_given_back(source, request)

    monkeypatch.setattr(ConstraintSource, "_count_given_back", note_given_back)
    worker = await make_worker(simulate=2.0, batch_slowdown=1.0)
    other_form = Sampling(max_tokens=40, grammar=schema({"enum": ["yes", "no"]}))
    # Once before, so that both processes that check have started.
    assert (await gateway.ask(sampling=other_form, tenant=VICTIM)).text in ('"yes"', '"no"')
    is_done = False
    watching = asyncio.create_task(longest_silence(gateway, lambda: is_done))
    ids = await publish(gateway, count)

    async def are_answered() -> bool:
        own = msgspec.structs.replace(other_form, grammar=schema({"enum": ["yes", "no", str(time.monotonic())]}))
        answer = await gateway.publish(gateway.request(sampling=own, tenant=VICTIM))
        assert (await answer.wait(2 * MAX_WAIT_S)).finish.reason == "stop"
        return await gateway.num_queued(batch_stream(HOSTILE)) == 0

    await wait_until(are_answered, 60 + 0.6 * count)
    is_done = True
    silence = await watching
    # No first use of a victim's grammar has waited for others for as long as they may.
    assert VICTIM not in given_back
    assert not worker.worker.has_failed.is_set()
    results = [await result_of(gateway, job) for job in ids]
    failed = [result for result in results if result.finish == "failed"]
    # On a busy machine some have waited for those before them as often as they may, and end so.
    assert {result.error_code for result in failed} <= {"invalid_grammar", "too_many_grammars"}
    assert all(result.error for result in failed)
    assert len(failed) >= count * 3 // 10
    assert {result.finish for result in results} <= {"failed", "stop", "length"}
    # A victim's stream goes on meanwhile.
    assert silence < 1.0
