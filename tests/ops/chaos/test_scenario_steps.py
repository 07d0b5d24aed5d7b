"""The steps of scenarios, on processes and servers that are made for the test: what they count and what they notice."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ops.chaos import aftermath, disturbance
from ops.chaos import load as load_module
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Kill
from ops.chaos.ledger import Entry, Ledger
from ops.chaos.mix import plain_bodies
from ops.chaos.outcome import NotPossibleHereError, Outcome, table
from ops.chaos.part import Part
from ops.chaos.scenarios import IN_TURN, NUM_IN_TURN, QUICK, SCENARIOS, fairness, of_ci, poison, resumed_streams
from ops.chaos.system import System, SystemOptions, _unpack

BODY = plain_bodies(4, 1)[0]
EVENTS = [f'data: {{"choices":[{{"text":"{text}"}}]}}' for text in "abcd"] + ["data: [DONE]"]


class FakeSystem:
    """A system of two gateways and two workers that run nowhere; `port` is that of all."""

    def __init__(self, port: int = 0) -> None:
        self.gateways = [SimpleNamespace(name=f"gateway-{number}", num_kills=1, log="") for number in range(2)]
        self.workers = [SimpleNamespace(name="worker-0", num_kills=4, num_exits=3)]
        self._port = port

    def port(self, name: str) -> int:
        return self._port

    def part(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, num_kills=0, is_running=True)

    async def __aenter__(self) -> FakeSystem:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    supervised = __call__ = lambda self, *options: self


class FakeLoad:
    """A load whose requests are all answered at once; it says that this process stood still for a while."""

    def __init__(self, *given: object, lag_s: float = 0.0, **options: object) -> None:
        self.ledger, self.max_lag_s, self.num_left = Ledger(), lag_s, 0
        self.fresh_lags_s = [0.5, 0.2]

    def fresh(self) -> FakeLoad:
        return FakeLoad(lag_s=self.fresh_lags_s.pop(0))

    async def run(self, number: int, concurrency: int) -> None:
        entry = Entry(0, "gateway-0", 1.0, status=200, num_done=1, first_at=1.25, ended_at=2.0)
        self.ledger.entries += [entry] * number

    async def learn_references(self) -> None:
        pass

    def stop(self) -> None:
        pass

    @asynccontextmanager
    async def going_on(self, concurrency: int) -> AsyncIterator[None]:
        yield


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What scenarios have the system checked for at their ends; none of them waits."""
    asked: list[dict[str, Any]] = []

    async def check(*given: object, **options: object) -> None:
        asked.append(options)

    monkeypatch.setattr(aftermath, "check", check)
    for module in (poison, disturbance):
        monkeypatch.setattr(module, "Load", FakeLoad)
    for module in (poison, resumed_streams):
        monkeypatch.setattr(module, "System", FakeSystem())
    monkeypatch.setattr(fairness, "_LONG_STEP_S", 0.0)
    monkeypatch.setattr(disturbance, "SETTLED_S", 0.0)
    return asked


async def test_process_that_the_scenario_kills_is_not_one_that_died(tmp_path: Path) -> None:
    script = "import time; print('ready', time.monotonic_ns(), flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script]
    part = Part("p", command, {}, tmp_path / "log", lambda log: "ready" in log)
    await part.start()
    assert (part.is_running, part.is_expected_dead, part.num_kills) == (True, False, 0)
    first = part.log
    assert part.rss_bytes > 1 << 20
    part.kill()
    assert (part.is_running, part.is_expected_dead, part.num_kills, part.rss_bytes) == (False, True, 1, 0)
    await part.start()
    assert not part.is_expected_dead
    assert first not in part.log
    await part.terminate()
    assert (part.is_running, part.is_expected_dead, part.num_kills) == (False, True, 1)


async def test_stream_that_breaks_off_goes_on_behind_its_last_event() -> None:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        # The first breaks off in the midst of an event, the second is refused, the third goes on.
        first = 0 if len(asked) == 1 else 2
        status = "503 Busy" if len(asked) == 2 else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nx-request-id: cmpl-1\r\n\r\n".encode())
        text = "".join(f"id: {number}\n{EVENTS[number]}\n\n" for number in range(first, len(EVENTS))).encode()
        text = text[: text.index(b"id: 2") + 9] if not first else text
        writer.write(f"{len(text):x}\r\n".encode() + text + (b"\r\n0\r\n\r\n" if first else b"\r\n"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    system: Any = FakeSystem(server.sockets[0].getsockname()[1])
    stream = resumed_streams._Stream(BODY)
    await resumed_streams._read(system, stream, asyncio.Semaphore(1))
    server.close()
    assert (stream.text, stream.problem, stream.is_done, len(stream.gaps_s)) == ("abcd", "", True, 1)
    assert [line.split(" HTTP")[0] for line in asked] == ["POST /v1/completions", *["GET /v1/streams/cmpl-1"] * 2]
    assert "Last-Event-ID: 1\r\n" in asked[2]


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ("id: 0\ndata: {}", "event 0 where 1 was due"),
        ("id: 2\ndata: {}", "event 2 where 1 was due"),
        ('id: 1\ndata: {"error":1}', "the stream failed: "),
    ],
)
def test_event_that_was_not_due_is_a_problem(event: str, problem: str) -> None:
    stream = resumed_streams._Stream(BODY, events={0: "{}"})
    resumed_streams._take(stream, event)
    assert stream.problem.startswith(problem)


async def test_streams_that_are_lost_or_doubled_are_counted_and_all_kills_told(
    checks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter([*["ab"] * resumed_streams._NUM_BODIES, "ab", "ab", "abb", "a"])
    gaps_s = iter([0.5, 2.5, 1.0])

    async def read(system: System, stream: resumed_streams._Stream, places: asyncio.Semaphore) -> None:
        text = next(texts)
        stream.events = {0: json.dumps({"choices": [{"text": text}]})}
        stream.problem = "lost" if text == "a" else ""
        if places._value > 1:
            stream.gaps_s = [gap_s] if (gap_s := next(gaps_s, 0.0)) else []

    monkeypatch.setattr(resumed_streams, "_read", read)
    outcome = await resumed_streams.RESUMED_STREAMS[0](4)
    assert (outcome.num_requests, outcome.num_wrong, outcome.num_failed) == (4, 1, 1)
    assert outcome.figures == {"kills": 6, "continuations": 3, "continued p99 s": 2.5, "continued max s": 2.5}
    assert [problem.partition(": ")[2] or problem for problem in outcome.problems] == [
        "a stream has another text than the undisturbed one",
        "lost",
        "streams went on after 2.50 s (p99)",
    ]


async def test_first_tokens_are_timed_and_the_longest_lag_of_all_rounds_is_kept(checks: list[dict[str, Any]]) -> None:
    polite: Any = FakeLoad()
    outcome = Outcome("", "")
    for number in (3, 2):
        assert await fairness._seconds_to_first_tokens(polite, number, outcome) == [0.25] * number
    assert (polite.max_lag_s, outcome.num_requests, outcome.problems) == (0.5, 5, [])


@pytest.mark.parametrize(("num_neighbours", "num_poisons"), [(None, 1), (40, 1), (41, 2), (80, 2)])
async def test_each_forty_neighbours_meet_a_poison(
    checks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, num_neighbours: int | None, num_poisons: int
) -> None:
    async def ask(system: System, number: int) -> Entry:
        return Entry(0, "gateway-0", 1.0, status=500, request_id=f"r{number}", error="poison", ended_at=2.0)

    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(poison, "_ask_poison", ask)
    monkeypatch.setattr(poison, "asyncio", SimpleNamespace(sleep=sleep, create_task=asyncio.create_task))
    outcome = await poison.poison(num_neighbours)
    assert (outcome.figures["poisons"], outcome.num_requests) == (num_poisons, 40 * num_poisons)
    assert (outcome.figures["worker deaths"], outcome.problems, len(checks)) == (3, [], 1)


async def test_disturbed_load_is_checked_by_what_the_scenario_promises(checks: list[dict[str, Any]]) -> None:
    class Fault(Kill):
        async def run(self, system: System) -> None:
            pass

    options = SystemOptions(num_workers=1)
    faults = Disturbance(
        "c",
        lambda n: [Fault(0.0, 0.0, "worker-0")],
        "p",
        options,
        [BODY],
        tail_s=0.0,
        min_faults=2,
        queue_timeout_s=9.0,
    )
    few = await disturbance.run_on(FakeSystem(), faults)  # type: ignore[arg-type]
    assert few.problems == ["there were 1 faults, not 2: nothing was shown"]
    assert checks == [{"queue_timeout_s": 9.0}]


def test_ci_runs_the_quick_scenarios_and_the_next_of_the_others_with_each_commit() -> None:
    assert not IN_TURN.keys() & QUICK.keys()
    assert {*IN_TURN, *QUICK} <= SCENARIOS.keys()
    beside = [of_ci(turn).items() - QUICK.items() for turn in range(40, 40 + len(IN_TURN) // NUM_IN_TURN + 1)]
    assert all(len(each) == NUM_IN_TURN for each in beside)
    assert set().union(*beside) == set(IN_TURN.items())
    assert all(QUICK.items() <= of_ci(turn).items() for turn in range(len(IN_TURN)))


async def test_undisturbed_results_are_those_of_one_published_job_of_each_kind() -> None:
    published: dict[str, int] = {}

    class Publisher:
        async def publish_surely(self, job_id: str, kind: int) -> None:
            published[job_id] = kind

        async def results(self, job_ids: list[str], timeout_s: float) -> dict[str, dict[str, Any]]:
            return {job_id: {"text": f"of {published[job_id]}"} for job_id in job_ids}

    learned = await poison.learn_results(Publisher())  # type: ignore[arg-type]
    assert learned == {kind: {"text": f"of {kind}"} for kind in range(poison.NUM_KINDS)}


def test_commit_that_the_history_lacks_cannot_be_tried_here(tmp_path: Path) -> None:
    with pytest.raises(NotPossibleHereError, match="no commit 00000000: "):
        _unpack("0" * 40, tmp_path / "earlier")
    assert not (tmp_path / "earlier").exists()


async def test_first_tokens_beside_long_prompts_are_compared_with_those_alone(
    checks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, numbers = list[bool](), set[int]()

    @asynccontextmanager
    async def polite_key(options: SystemOptions, num_greedy: int) -> AsyncIterator[tuple[object, ...]]:
        yield FakeSystem(), FakeLoad(), ["greedy"]

    @asynccontextmanager
    async def asked_meanwhile(system: FakeSystem, asked: list[Any]) -> AsyncIterator[None]:
        is_asked.append(True)
        yield
        is_asked.clear()

    async def seconds(load: FakeLoad, number: int, outcome: Outcome) -> list[float]:
        numbers.add(number)
        return [9.0 if is_asked else 1.0] * number

    monkeypatch.setattr(fairness, "_polite_key", polite_key)
    monkeypatch.setattr(fairness, "_asked_meanwhile", asked_meanwhile)
    monkeypatch.setattr(fairness, "_seconds_to_first_tokens", seconds)
    await fairness.long_prompts(100)
    assert numbers == {20}
    checks.clear()
    outcome = await fairness.long_prompts(4)
    assert outcome.figures["TTFT p50 alone and beside 1,000 long prompts s"] == [1.0, 9.0]
    assert outcome.figures["longest TTFT beside them s"] == 9.0
    assert outcome.problems[-1:] == ["TTFT was 9.0x"]
    assert len(checks) == 1


def test_table_has_a_head_for_every_column() -> None:
    outcome = Outcome("kill", "0 failed", 8, 1, 2, 3, [0.5], [], ["one was lost"], {"num kept": 1, "kills": 4})
    heads, _, row, *told = table([outcome]).splitlines()
    assert re.split(r"  +", heads) == [
        "case", "n", "failed", "wrong", "refused", "silence p50/p99/max s", "promise", "kept",
    ]  # fmt: skip
    assert re.split(r"  +", row) == ["kill", "8", "1", "2", "3", "0.50/0.50/0.50", "0 failed", "NO"]
    assert told == ["kill: kills 4", "kill: PROBLEM: one was lost"]


async def test_reference_that_is_answered_is_asked_for_once_and_one_that_is_refused_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses = [429, 200, 200]

    async def ask(body: object, port: int, key: str, entry: Entry, timeout_s: float) -> None:
        entry.status, entry.num_done, entry.retry_after_s = statuses.pop(0), 1, 0.001

    monkeypatch.setattr(load_module, "ask", ask)
    load = load_module.Load(FakeSystem(), [BODY])  # type: ignore[arg-type]
    assert (await load._ask_undisturbed(0, "gateway-0")).status == 200
    assert statuses == [200]


async def test_workers_that_a_poisonous_job_kills_are_started_again_until_it_is_given_up(
    checks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, is_supervised = FakeSystem(), list[bool]()

    @asynccontextmanager
    async def supervised(restart_s: float) -> AsyncIterator[None]:
        is_supervised.append(True)
        yield
        is_supervised.clear()

    class Publisher:
        def __init__(self, system: object) -> None:
            pass

        async def __aenter__(self) -> Publisher:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        async def publish_surely(self, job_id: str, *kind: int, **fields: object) -> None:
            assert is_supervised or job_id.startswith("undisturbed")

        async def results(self, job_ids: list[str], timeout_s: float) -> dict[str, dict[str, Any]]:
            return {job_id: {"text": "", "finish": "failed", "error": "given up"} for job_id in job_ids}

    monkeypatch.setattr(system, "supervised", supervised)
    monkeypatch.setattr(poison, "System", lambda options: system)
    monkeypatch.setattr(poison, "Publisher", Publisher)
    monkeypatch.setattr(poison, "_PAUSE_S", 0.0)
    monkeypatch.setattr(poison, "_BESIDE_PEOPLE_S", 0.0)
    outcome = await poison.batch_poison(8)
    assert (outcome.figures["poisons"], outcome.problems) == (1, [])


def test_results_that_are_missing_or_others_than_undisturbed_ones_are_counted_and_the_first_three_told() -> None:
    expected: dict[int, dict[str, Any]] = {kind: {"text": f"{kind}"} for kind in range(poison.NUM_KINDS)}
    job_ids = [f"job-{number}" for number in range(poison.NUM_KINDS + 6)]
    results: dict[str, dict[str, Any]] = {
        job_id: {"text": f"{number % poison.NUM_KINDS}", "attempt": number} for number, job_id in enumerate(job_ids)
    }
    del results["job-0"]
    for number in range(5):
        results[f"job-{number + 2}"]["text"] = "other"
    outcome = Outcome("", "")
    poison.judge(outcome, job_ids, results, expected)
    assert (outcome.num_requests, outcome.num_failed, outcome.num_wrong) == (len(job_ids), 1, 5)
    assert [problem.partition(":")[0] for problem in outcome.problems] == [
        "1 jobs have no result", "job-2", "job-3", "job-4",
    ]  # fmt: skip
    assert outcome.figures["most attempts"] == len(job_ids) - 1
