"""`headrace batch submit`, `watch`, `results` and `cancel` against a gateway, with a worker that echoes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.gateway.batches.conftest import EchoWorker, Place, echo, echo_worker
from tests.gateway.batches.test_batches import jsonl, line
from tests.gateway.gateway_process import API_KEY
from tests.ops.cli.command import headrace
from tests.servers import NatsServer
from tests.waiting import until

Command = Callable[..., "asyncio.Task[tuple[int, str, str]]"]


@pytest.fixture
async def system(start_nats: Callable[..., NatsServer], tmp_path: Path) -> AsyncIterator[tuple[EchoWorker, Command]]:
    """A system with one gateway; a command runs beside it and returns status, output and what it told."""
    place = Place(start_nats().url, tmp_path, {})
    async with echo_worker(place.nats_url) as worker:
        with place.gateway("gateway") as gateway:

            def run(*arguments: object) -> asyncio.Task[tuple[int, str, str]]:
                command = ("batch", *map(str, arguments), "--url", gateway.url, "--api-key", API_KEY)
                done = asyncio.to_thread(headrace, *command)

                async def result() -> tuple[int, str, str]:
                    found = await done
                    return found.returncode, found.stdout, found.stderr

                return asyncio.create_task(result())

            yield worker, run


async def test_file_is_submitted_watched_and_its_results_are_continued(
    system: tuple[EchoWorker, Command], tmp_path: Path
) -> None:
    worker, run = system
    worker.answer = lambda request: echo(request) if request.messages[-1].content != "text 2" else None  # type: ignore[index]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(jsonl([line(number, "m") for number in range(3)]))
    status, told, _ = await run("submit", file)
    assert status == 0
    batch_id = json.loads(told)["id"]
    await until(lambda: len(worker.computed) == 2)
    await asyncio.sleep(1.5)
    assert (await run("results", batch_id, "--output", output))[0] == 0
    early = output.read_bytes()
    assert early.count(b"\n") == 2
    watching = run("watch", batch_id)
    worker.answer = echo
    status, _, shown = await watching
    assert status == 0
    assert "3 of 3 lines have an answer" in shown
    for _ in range(2):
        assert (await run("results", batch_id, "--output", output, "--follow"))[0] == 0
        assert output.read_bytes().startswith(early)
        assert sorted(json.loads(each)["custom_id"] for each in output.read_text().splitlines()) == [
            "line-0",
            "line-1",
            "line-2",
        ]
    status, told, _ = await run("results", batch_id)
    assert told == output.read_text()


async def test_wrong_lines_are_listed_and_a_cancelled_batch_fails(
    system: tuple[EchoWorker, Command], tmp_path: Path
) -> None:
    worker, run = system
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(0, "m"), line(0, "m"), line(1, "m", url="/v1/completions")]))
    status, _, shown = await run("submit", file, "--watch")
    assert status == 1
    assert "line 2: The custom_id 'line-0'" in shown
    assert "(invalid_url)" in shown
    worker.answer = lambda request: None
    file.write_bytes(jsonl([line(0, "m")]))
    batch_id = json.loads((await run("submit", file))[1])["id"]
    # Ids of batches are cancelled over HTTP.
    status, told, _ = await run("cancel", batch_id)
    assert (status, json.loads(told)["status"]) == (0, "cancelling")
    status, _, shown = await run("watch", batch_id)
    assert status == 1
    assert "cancelled: 0 of 1 lines" in shown
    assert json.loads((await run("results", batch_id, "--errors"))[1])["error"]["code"] == "batch_cancelled"
    status, _, shown = await run("watch", "batch_" + "0" * 32)
    assert status == 2
    assert "No batch found" in shown


@pytest.mark.parametrize("content", ["", "hello", "[]", '{"custom_id": "a"}'])
def test_file_that_is_none_of_a_batch_is_refused_before_it_is_uploaded(tmp_path: Path, content: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(content)
    found = headrace("batch", "submit", str(file), "--url", "http://127.0.0.1:1", "--api-key", "k")
    assert found.returncode == 2
    assert "names its url" in found.stderr
