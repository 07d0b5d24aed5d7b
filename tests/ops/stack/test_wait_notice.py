"""Waiting is reported again and again."""

import asyncio

import pytest

from ops.stack.wait_notice import told_while


def test_long_work_is_told_of_again_and_again_and_with_what_it_waits_for_then() -> None:
    said: list[str] = []
    what = iter(["the worker is starting", "the first answer"])

    async def wait() -> str:
        is_told = asyncio.Event()

        def say(words: str) -> None:
            said.append(words)
            if len(said) == 2:
                is_told.set()

        async def work() -> str:
            await is_told.wait()
            return "done"

        return await told_while(work(), lambda: next(what), say, every_s=0.001)

    assert asyncio.run(wait()) == "done"
    assert [words.partition(" s: ")[2] for words in said] == ["the worker is starting", "the first answer"]
    assert all(words.startswith("waiting for ") for words in said)


def test_short_work_is_not_told_of() -> None:
    said: list[str] = []

    async def work() -> str:
        return "done"

    assert asyncio.run(told_while(work(), lambda: "it", said.append)) == "done"
    assert said == []


def test_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        asyncio.run(told_while(fail(), lambda: "it", [].append))
