"""What is said of waiting, of a start, and of what children log."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from gpu_worker.execution.start_up import Stage
from gpu_worker.start.progress_bar import ProgressBar
from ops.stack import console as console_module
from ops.stack.console import Console, StartProgress, read_progress, told_of_nats, told_while
from shared.telemetry import LineFormatter
from tests.gpu_worker.start.test_progress_bar import Terminal


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


def test_short_work_is_not_told_of_and_its_error_is_raised() -> None:
    said: list[str] = []

    async def work(number: str) -> int:
        return int(number)

    assert asyncio.run(told_while(work("5"), lambda: "it", said.append)) == 5
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(told_while(work("x"), lambda: "it", said.append))
    assert said == []


async def test_interrupted_wait_ends_the_work() -> None:
    said, has_ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    waiting = asyncio.create_task(told_while(work(), lambda: "it", lambda words: said.set(), every_s=0.001))
    await said.wait()
    waiting.cancel()
    async with asyncio.timeout(10):
        await has_ended.wait()


async def test_wait_for_nats_is_told_once_it_is_long_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "QUIET_S", 0.01)
    said: asyncio.Queue[str] = asyncio.Queue()
    with told_of_nats("nats://user:secret@host:4222", 5.0, said.put_nowait):
        pass
    await asyncio.sleep(0.05)
    assert said.empty()
    async with asyncio.timeout(10):
        with told_of_nats("nats://user:secret@host:4222", 5.0, said.put_nowait):
            assert await said.get() == "waiting up to 5 s for NATS at host:4222"


@pytest.mark.parametrize(
    ("line", "is_relayed"),
    [
        (b"[1] [WRN] JetStream is slow", True),
        (b"2026-01-01T00:00:00Z ERROR gateway it broke", True),
        (b"Traceback (most recent call last):", True),
        (b"ValueError: it broke", True),
        (b"[1] [INF] Server is ready", False),
        (b"[1] [WRN] Plaintext passwords detected, use nkeys or bcrypt", False),
        (b"WARNING Memory overcommit must be enabled!", False),
    ],
)
def test_warnings_of_children_are_relayed_unless_they_mean_nothing_here(line: bytes, is_relayed: bool) -> None:
    Console(output := io.StringIO()).relay("nats", line + b"x" * 1000)
    assert output.getvalue() == (f"      nats  {(line + b'x' * 1000).decode()[:400]}\n" if is_relayed else "")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []
        self.setFormatter(LineFormatter({"role": "worker"}))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).encode())


def test_what_a_worker_logs_of_its_start_is_understood() -> None:
    handler, seconds = _Lines(), iter(range(0, 100, 3))
    logger = logging.getLogger("gpu_worker.start.progress_bar")
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    try:
        bar = ProgressBar(io.StringIO(), lambda: float(next(seconds)))
        bar(Stage.COMPILE, 3, 9)
        for gigabytes in (1, 2):
            bar(Stage.LOAD, gigabytes * 10**9, 4 * 10**9)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    compiling, loading = map(read_progress, handler.lines)
    assert compiling == StartProgress("compiling kernels, once", "3", "9", 33)
    assert loading == StartProgress("loading weights", "2.00 GB", "4.00 GB", 50)


def test_other_lines_tell_of_no_progress() -> None:
    assert read_progress(b"2026-01-01T00:00:00Z INFO gpu_worker.start.worker serving model=x percent=3") is None


def test_bar_is_drawn_over_itself_on_a_terminal_and_not_in_a_file() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        console = Console(stream)
        for done in (3, 6):
            is_drawn = console.draw("worker-0", StartProgress("loading", str(done), "9", 100 * done // 9).bar)
            assert is_drawn == stream.isatty()
        console.say("worker-0", "done")
    assert file.getvalue() == "  worker-0  done\n"
    first, second, last = terminal.getvalue().split("\r\x1b[K")
    assert first == f"  worker-0  loading  [{'#' * 9}{'.' * 21}] 3 of 9"
    assert second.endswith("6 of 9")
    assert last == "  worker-0  done\n"
