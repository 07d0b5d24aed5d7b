from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import psutil
import pytest

from shared.sampling import Grammar
from shared.structured_output import GrammarError, LlguidanceMissingError, checker_link, checker_process
from shared.structured_output import checker as checker_module
from shared.structured_output.checker import CheckerBusyError, CheckerFailedError, GrammarChecker
from tests.gateway.wire_worker import until

PATIENT = 30.0
"""Seconds that a test waits for a verdict on a machine that does much else."""


def schema_grammar(schema: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


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
    with pytest.raises(GrammarError, match="more than 100 ms"):
        await checker.check("t", doubling(1_500), PATIENT)
    await checker.check("t", schema_grammar({"type": "integer"}), PATIENT)
    assert checker._link.pid == process


def test_grammar_that_only_its_compilation_shows_to_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for_ever(_: Grammar) -> None:
        while True:
            pass

    monkeypatch.setattr(checker_process, "try_compiling", compile_for_ever)
    # The process that is forked here has all that other tests have loaded.
    monkeypatch.setattr(checker_process, "MEMORY_LIMIT_BYTES", 1 << 44)
    fork = checker_process._begin_check(1, 0, msgspec.msgpack.encode(schema_grammar({})))
    verdict = checker_process._verdict_of(fork)
    assert verdict.reason == checker_process.TOO_LONG
    assert verdict.cpu_s >= checker_process.CPU_LIMIT_S * 0.9


def test_grammar_that_ends_its_process_is_refused_for_its_size_and_not_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As when the stack overflows, or memory runs out.
    monkeypatch.setattr(checker_process, "check_grammar", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(checker_process, "MEMORY_LIMIT_BYTES", 1 << 44)
    fork = checker_process._begin_check(1, 0, msgspec.msgpack.encode(schema_grammar({})))
    assert checker_process._verdict_of(fork).reason == checker_process.TOO_LARGE


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


async def test_burst_of_hostile_grammars_is_answered_in_time_and_others_go_between(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check("bad", schema_grammar({}), PATIENT)
    # What is being checked ends when the test lets it, and is waited for meanwhile.
    monkeypatch.setattr(checker_module, "TIMEOUT_S", PATIENT)
    monkeypatch.setattr(checker_module, "LONG_S", PATIENT)
    ask, go_on = checker._link.ask, asyncio.Event()
    wait, waits = asyncio.wait, list[float | None]()

    async def held_up(message: bytes, niceness: int) -> Any:
        if b"const" not in message:
            await go_on.wait()
        return await ask(message, niceness)

    async def noted(tasks: Any, *, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return await wait(tasks, timeout=timeout)

    monkeypatch.setattr(checker._link, "ask", held_up)
    monkeypatch.setattr(checker_module.asyncio, "wait", noted)
    num = checker_module.MAX_WAITING_PER_TENANT + 4
    hostile = [asyncio.create_task(checker.check("bad", doubling(1_000 + number))) for number in range(num)]
    await until(lambda: len(waits) >= checker_module.MAX_WAITING_PER_TENANT)
    # The first one of a tenant that nobody knows yet is given more time, and too many wait not at all.
    assert waits == [PATIENT] + [checker_module.SHORT_TIMEOUT_S] * (checker_module.MAX_WAITING_PER_TENANT - 1)
    # The hostile one that is checked meanwhile leaves a place.
    await checker.check("good", schema_grammar({"const": 1}), PATIENT)
    assert not hostile[0].done()
    go_on.set()
    answers = await asyncio.gather(*hostile, return_exceptions=True)
    busy = [answer for answer in answers if isinstance(answer, CheckerBusyError)]
    refused = [answer for answer in answers if isinstance(answer, GrammarError)]
    assert len(busy) + len(refused) == num
    assert all(answer.retry_after_s >= 1.0 for answer in busy)
    # The first ones may be refused in time; all but the one that is being checked wait for their own tenant's.
    assert isinstance(answers[0], GrammarError)
    assert sum(not answer.is_own for answer in busy) <= 1
    # The checks have gone on: whoever comes back finds the verdict.
    with pytest.raises(GrammarError, match="more than 100 ms"):
        await checker.check("bad", doubling(1_000), PATIENT)
    with pytest.raises(GrammarError, match="more than 100 ms"):
        await checker.check("bad", doubling(1_000), 0.0)


async def test_usual_grammar_is_waited_for_on_a_busy_machine_and_one_of_a_tenant_that_takes_long_is_not(
    checker: GrammarChecker,
) -> None:
    with pytest.raises(GrammarError):
        await checker.check("bad", doubling(1_000), PATIENT)
    ask = checker._link.ask

    async def slow(message: bytes, niceness: int) -> Any:
        await asyncio.sleep(2 * checker_module.SHORT_TIMEOUT_S)
        return await ask(message, niceness)

    checker._link.ask = slow  # type: ignore[method-assign]
    bad = asyncio.create_task(checker.check("bad", schema_grammar({})))
    # Two clients that begin with the same schema.
    await asyncio.gather(*(checker.check("good", schema_grammar({"const": 1})) for _ in range(2)))
    with pytest.raises(CheckerBusyError):
        await bad


async def test_tenants_whose_grammars_take_long_leave_a_place_to_others(checker: GrammarChecker) -> None:
    for tenant in "ab":
        with pytest.raises(GrammarError):
            await checker.check(tenant, doubling(1_000), PATIENT)
        assert checker._tenants[tenant].takes_long
    # What is being checked ends when the test lets it.
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


async def test_process_gets_no_secrets(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "not-for-the-process")
    assert "not-for-the-process" not in checker_link._environment().values()
    await checker.check("t", schema_grammar({}), PATIENT)
    assert "not-for-the-process" not in psutil.Process(checker._link.pid).environ().values()


async def test_closed_checker_fails_what_waits_and_starts_nothing(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}), PATIENT)
    waiting = asyncio.create_task(checker.check("t", doubling(1_500), PATIENT))
    await asyncio.sleep(0.01)
    await checker.close()
    with pytest.raises(CheckerFailedError):
        await waiting
    with pytest.raises(CheckerFailedError):
        await checker.check("t", schema_grammar({"const": 1}), PATIENT)
