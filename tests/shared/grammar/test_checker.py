from __future__ import annotations

import asyncio
import dataclasses
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest

from shared import limited_link, limited_process
from shared.grammar import Grammar, GrammarError, LlguidanceMissingError, checker_process
from shared.grammar import checker as checker_module
from shared.grammar.checker import CheckerBusyError, GrammarChecker
from shared.grammar.checker_process import Verdict, check_for_bytes, checked
from shared.limited_link import LimitedProcessError
from shared.limited_process import Outcome
from tests.gateway.wire_worker import until

PATIENT = 80.0
"""Seconds that a test waits for a verdict on a machine that does much else."""


def schema_grammar(schema: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


def verdict_of(check: Callable[[Grammar], None]) -> Verdict:
    message = msgspec.msgpack.encode(schema_grammar({}))
    fork = limited_process.begin(1, 0, message, partial(checked, check), checker_process.LIMITS)
    return Verdict.of(limited_process.outcome_of(fork))


def doubling(length: int) -> Grammar:
    """Each lexeme is twice the next one: 2 ** length characters."""
    lexemes = "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(length))
    return Grammar(kind="lark", source=f'start: A0\n{lexemes}A{length}: "z"')


async def test_grammars_are_accepted_and_refused_with_reason_and_place(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({"type": "object"}), PATIENT)
    with pytest.raises(GrammarError) as refused:
        await checker.check("t", schema_grammar({"properties": {"a": {"not": {}}}}), PATIENT)
    assert (refused.value.path, refused.value.reason) == (".properties.a", "'not' is not supported.")


async def test_grammar_that_takes_too_long_is_refused_and_the_next_one_is_checked(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}), PATIENT)
    process = checker._link.pid
    with pytest.raises(GrammarError, match="takes longer to be compiled"):
        await checker.check("t", doubling(1_500), PATIENT)
    await checker.check("t", schema_grammar({"type": "integer"}), PATIENT)
    assert checker._link.pid == process


def test_grammar_that_only_its_compilation_shows_to_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for_ever(_: Grammar) -> None:
        while True:
            pass

    monkeypatch.setattr(checker_process, "try_compiling", compile_for_ever)
    verdict = verdict_of(check_for_bytes)
    assert verdict.reason == checker_process.TOO_LONG
    assert verdict.cpu_s >= checker_process.CPU_LIMIT_S * 0.9


def test_grammar_that_ends_its_process_is_refused_for_its_size_and_not_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As when the stack overflows.
    monkeypatch.setattr(checker_process, "check_grammar", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert verdict_of(check_for_bytes).reason == checker_process.TOO_LARGE


def test_check_gets_no_more_memory_than_is_allowed() -> None:
    def reason(num_bytes: int) -> str:
        def take(_: Grammar) -> None:
            try:
                mmap.mmap(-1, num_bytes)
            except OSError:
                raise MemoryError from None

        return verdict_of(take).reason

    assert reason(checker_process.MEMORY_LIMIT_BYTES // 2) == ""
    assert reason(checker_process.MEMORY_LIMIT_BYTES + (1 << 20)) == checker_process.TOO_LARGE


def test_check_that_gets_no_processor_is_ended_and_its_grammar_is_not_to_blame() -> None:
    limits = dataclasses.replace(checker_process.LIMITS, time_s=0.2)
    message = msgspec.msgpack.encode(schema_grammar({}))
    fork = limited_process.begin(1, 0, message, partial(checked, lambda _: time.sleep(20)), limits)
    outcome = limited_process.outcome_of(fork)
    assert (outcome.content, outcome.is_late, outcome.is_interrupted) == (None, False, True)


def test_stack_of_a_check_is_smaller_than_that_of_whoever_compiles_after_it() -> None:
    def check(_: Grammar) -> None:
        raise GrammarError(str(threading.stack_size()))

    assert int(verdict_of(check).reason) == checker_process.STACK_BYTES
    assert checker_process.STACK_BYTES < checker_process.COMPILE_STACK_BYTES


async def test_verdict_is_kept_per_tenant(checker: GrammarChecker) -> None:
    asked: list[bytes] = []
    ask = checker._link.ask

    async def counting(message: bytes, niceness: int) -> Any:
        asked.append(message)
        return await ask(message, niceness)

    checker._link.ask = counting  # type: ignore[method-assign]
    for tenant in ("a", "b"):
        many = checker_module.MAX_WAITING_PER_TENANT * 2
        await asyncio.gather(*(checker.check(tenant, schema_grammar({}), PATIENT) for _ in range(many)))
        for _ in range(2):
            with pytest.raises(GrammarError):
                await checker.check(tenant, schema_grammar({"not": {}}), PATIENT)
    assert len(asked) == 4


async def test_kept_verdicts_are_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS_PER_TENANT", 3)
    monkeypatch.setattr(checker_module, "MAX_TENANTS", 2)
    for tenant in "abcd":
        for index in range(4):
            await checker.check(tenant, schema_grammar({"const": index}), PATIENT)
    assert list(checker._tenants) == ["c", "d"]
    assert [len(own._verdicts) for own in checker._tenants.values()] == [3, 3]


async def test_tenants_whose_grammars_wait_stay_and_then_those_go_first_that_asked_longest_ago(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "MAX_TENANTS", 2)
    # All three wait for the process, which the first of them starts.
    await asyncio.gather(*(checker.check(tenant, schema_grammar({"const": 1}), PATIENT) for tenant in "abc"))
    assert list(checker._tenants) == ["a", "b", "c"]
    # The one that asked longest ago asks again.
    await checker.check("a", schema_grammar({}), PATIENT)
    assert list(checker._tenants) == ["c", "a"]


async def test_process_that_was_killed_is_started_again(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({"const": 1}), PATIENT)
    assert checker._link.pid is not None
    os.kill(checker._link.pid, signal.SIGKILL)
    await checker.check("t", schema_grammar({"const": 2}), PATIENT)


async def test_client_that_goes_away_does_not_mix_up_verdicts(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({"const": 1}), PATIENT)
    leaving = asyncio.create_task(checker.check("t", doubling(1_500), PATIENT))
    await asyncio.sleep(0.02)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check("t", schema_grammar({"const": 2}), PATIENT)
    with pytest.raises(GrammarError, match="not"):
        await checker.check("t", schema_grammar({"not": {}}), PATIENT)


async def test_burst_of_hostile_grammars_waits_in_line_and_others_go_between(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check("bad", schema_grammar({}), PATIENT)
    monkeypatch.setattr(checker_module, "MAX_WAITING_PER_TENANT", 4)
    ask, go_on = checker._link.ask, asyncio.Event()

    async def held_up(message: bytes, niceness: int) -> Any:
        if b"const" not in message:
            await go_on.wait()
        return await ask(message, niceness)

    monkeypatch.setattr(checker._link, "ask", held_up)
    hostile = [asyncio.create_task(checker.check("bad", doubling(1_000 + number), PATIENT)) for number in range(8)]
    await until(lambda: len(checker._tenants["bad"].waiting) == 4)
    # The hostile one that is checked meanwhile leaves a place.
    await checker.check("good", schema_grammar({"const": 1}), PATIENT)
    assert not hostile[0].done()
    # A full line refuses, and a grammar that waits too long is refused with Retry-After.
    over = await asyncio.gather(*hostile[4:], return_exceptions=True)
    assert all(isinstance(error, CheckerBusyError) and error.is_own for error in over)
    with pytest.raises(CheckerBusyError) as caught:
        await checker.check("bad", doubling(1_000 + 3), 0.01)
    assert (caught.value.is_own, caught.value.retry_after_s >= 1.0) == (True, True)
    go_on.set()
    answers = await asyncio.gather(*hostile[:4], return_exceptions=True)
    assert all(isinstance(answer, GrammarError) for answer in answers)
    # The checks have gone on: whoever comes back finds the verdict.
    with pytest.raises(GrammarError, match="takes longer to be compiled"):
        await checker.check("bad", doubling(1_000 + 3), 0.0)


@pytest.mark.parametrize("count", [12, 40])
async def test_first_uses_of_many_grammars_at_once_are_all_checked(checker: GrammarChecker, count: int) -> None:
    grammars = [schema_grammar({"const": number}) for number in range(count)]
    await asyncio.gather(*(checker.check("t", grammar, PATIENT) for grammar in grammars))


async def test_what_waits_for_all_tenants_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_WAITING_BYTES", 1_000)
    with pytest.raises(CheckerBusyError) as caught:
        await checker.check("t", schema_grammar({"const": "x" * 1_000}), PATIENT)
    assert not caught.value.is_own
    for number in range(3):
        await checker.check("t", schema_grammar({"const": f"{number}" * 500}), PATIENT)


async def test_tenants_whose_grammars_take_long_leave_a_place_to_others(checker: GrammarChecker) -> None:
    for tenant in "ab":
        with pytest.raises(GrammarError):
            await checker.check(tenant, doubling(1_000), PATIENT)
        assert checker._tenants[tenant].takes_long
    # The grammar under check ends when the test lets it.
    asked, go_on = list[bytes](), asyncio.Event()
    ask = checker._link.ask

    async def held_up(message: bytes, niceness: int) -> Any:
        asked.append(message)
        if b"const" not in message:
            await go_on.wait()
        return await ask(message, niceness)

    checker._link.ask = held_up  # type: ignore[method-assign]
    long_ones = [asyncio.create_task(checker.check(tenant, schema_grammar({}), PATIENT)) for tenant in "ab"]
    await asyncio.sleep(0)
    await checker.check("c", schema_grammar({"const": 1}), PATIENT)
    assert len(asked) == 2
    go_on.set()
    await asyncio.gather(*long_ones)
    assert len(asked) == 3


async def test_short_grammars_between_long_ones_hide_no_tenant_that_takes_long(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is forgotten while the checks wait for a processor.
    monkeypatch.setattr(checker_module, "SPENT_FORGOTTEN", 0.0)
    for number in range(3):
        with pytest.raises(GrammarError):
            await checker.check("a", doubling(1_000 + number), PATIENT)
        await checker.check("a", schema_grammar({"const": number}), PATIENT)
    monkeypatch.undo()
    own, now = checker._tenants["a"], time.monotonic()
    own._spent_at = now
    assert own.takes_long
    # It is forgotten in time.
    monkeypatch.setattr(checker_module.time, "monotonic", lambda: now + 60.0)
    assert not own.takes_long


async def test_missing_package_is_named(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LlguidanceMissingError):
        await checker.check("t", schema_grammar({}), PATIENT)


async def test_check_that_is_interrupted_twice_is_told_to_all_who_wait_and_logged_as_no_defect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checker = GrammarChecker()

    async def started() -> None:
        pass

    async def interrupted(message: bytes, niceness: int) -> Outcome:
        return Outcome(is_interrupted=True)

    monkeypatch.setattr(checker._link, "start", started)
    monkeypatch.setattr(checker._link, "_exchange", interrupted)
    asking = (checker.check("t", schema_grammar({}), PATIENT) for _ in range(2))
    assert [type(each) for each in await asyncio.gather(*asking, return_exceptions=True)] == [LimitedProcessError] * 2
    await checker.close()
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_process_gets_no_secrets(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "not-for-the-process")
    assert "not-for-the-process" not in limited_link._environment().values()
    await checker.check("t", schema_grammar({}), PATIENT)
    assert "not-for-the-process" not in psutil.Process(checker._link.pid).environ().values()


async def test_closed_checker_fails_what_waits_and_starts_nothing(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}), PATIENT)
    waiting = asyncio.create_task(checker.check("t", doubling(1_500), PATIENT))
    await asyncio.sleep(0.01)
    await checker.close()
    with pytest.raises(LimitedProcessError):
        await waiting
    with pytest.raises(LimitedProcessError):
        await checker.check("t", schema_grammar({"const": 1}), PATIENT)
