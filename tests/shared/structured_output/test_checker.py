from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.sampling import Grammar
from shared.structured_output import GrammarError, LlguidanceMissingError, checker_process
from shared.structured_output import checker as checker_module
from shared.structured_output.checker import CheckerBusyError, CheckerFailedError, GrammarChecker


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
    await checker.check("t", schema_grammar({"type": "object"}))
    with pytest.raises(GrammarError) as refused:
        await checker.check("t", schema_grammar({"properties": {"a": {"not": {}}}}))
    assert (refused.value.path, refused.value.reason) == (".properties.a", "'not' is not supported.")


async def test_grammar_that_takes_too_long_is_refused_and_the_next_one_is_checked(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}))
    process = checker._process
    with pytest.raises(GrammarError, match="more than 100 ms"):
        await checker.check("t", doubling(1_500))
    await checker.check("t", schema_grammar({"type": "integer"}))
    assert checker._process is process


def test_grammar_that_only_its_compilation_shows_to_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for_ever(_: Grammar) -> None:
        while True:
            pass

    monkeypatch.setattr(checker_process, "try_compiling", compile_for_ever)
    assert checker_process._check_in_fork(schema_grammar({})).reason == checker_process.TOO_LONG


async def test_verdict_is_kept_per_tenant(checker: GrammarChecker) -> None:
    asked: list[bytes] = []
    ask = checker._ask

    async def counting(message: bytes) -> Any:
        asked.append(message)
        return await ask(message)

    checker._ask = counting  # type: ignore[method-assign]
    for tenant in ("a", "b"):
        many = checker_module.MAX_WAITING_PER_TENANT * 2
        await asyncio.gather(*(checker.check(tenant, schema_grammar({})) for _ in range(many)))
        for _ in range(2):
            with pytest.raises(GrammarError):
                await checker.check(tenant, schema_grammar({"not": {}}))
    assert len(asked) == 4


async def test_kept_verdicts_are_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS_PER_TENANT", 3)
    monkeypatch.setattr(checker_module, "MAX_TENANTS", 2)
    for tenant in "abcd":
        for index in range(4):
            await checker.check(tenant, schema_grammar({"const": index}))
    assert list(checker._tenants) == ["c", "d"]
    assert [len(own._verdicts) for own in checker._tenants.values()] == [3, 3]


async def test_process_that_was_killed_is_started_again(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({"const": 1}))
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    await checker.check("t", schema_grammar({"const": 2}))


async def test_client_that_goes_away_does_not_mix_up_verdicts(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({"const": 1}))
    leaving = asyncio.create_task(checker.check("t", doubling(1_500)))
    await asyncio.sleep(0.02)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check("t", schema_grammar({"const": 2}))
    with pytest.raises(GrammarError, match="not"):
        await checker.check("t", schema_grammar({"not": {}}))


async def test_tenant_with_many_hostile_grammars_is_refused_and_others_go_between(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}))
    num = checker_module.MAX_WAITING_PER_TENANT + 4
    hostile = [asyncio.create_task(checker.check("bad", doubling(1_000 + i))) for i in range(num)]
    await asyncio.sleep(0)
    await checker.check("good", schema_grammar({"const": 1}))
    # Of the hostile ones, at most the first was checked before.
    assert sum(isinstance(_error(task), GrammarError) for task in hostile) <= 2
    assert sum(isinstance(_error(task), CheckerBusyError) for task in hostile) == 4
    for task in [*hostile, *checker._tasks._tasks]:
        task.cancel()
    await asyncio.gather(*hostile, *checker._tasks._tasks, return_exceptions=True)


def _error(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() else None


async def test_missing_package_is_named(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LlguidanceMissingError):
        await checker.check("t", schema_grammar({}))


def test_process_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATS_PASSWORD", "secret")
    assert "secret" not in checker_module._environment().values()


async def test_closed_checker_fails_what_waits_and_starts_nothing(checker: GrammarChecker) -> None:
    await checker.check("t", schema_grammar({}))
    waiting = asyncio.create_task(checker.check("t", doubling(1_500)))
    await asyncio.sleep(0)
    await checker.close()
    with pytest.raises(CheckerFailedError):
        await waiting
    assert checker._process is None
