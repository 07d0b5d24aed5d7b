"""`headrace batch submit`, `watch`, `results` and `cancel` against a gateway, with a worker that echoes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ops.cli.batch_api import BatchApi
from ops.cli.batch_files import _Bar, _patiently
from ops.cli.running_system import Endpoint, ServerRefusedError
from tests.gateway.batches.conftest import EchoWorker, Place, echo, echo_worker
from tests.gateway.batches.test_batches import jsonl, line
from tests.gateway.gateway_process import API_KEY
from tests.ops.cli.command import headrace, headrace_here
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
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(number, "m") for number in range(3)]))
    status, told, _ = await run("submit", file)
    assert status == 0
    batch_id = json.loads(told)["id"]
    await until(lambda: len(worker.computed) == 2)
    early = ""
    async with asyncio.timeout(60):
        while early.count("\n") < 2:
            status, early, _ = await run("results", batch_id)
            assert status == 0
    following = run("results", batch_id, "--follow")
    watching = run("watch", batch_id)
    worker.answer = echo
    status, _, shown = await watching
    assert status == 0
    assert "3 of 3 lines have an answer" in shown
    for status, told, _ in (await following, await run("results", batch_id)):
        assert status == 0
        assert told.startswith(early)
        assert sorted(json.loads(each)["custom_id"] for each in told.splitlines()) == ["line-0", "line-1", "line-2"]


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


async def test_batches_are_listed_and_their_results_and_errors_printed(
    system: tuple[EchoWorker, Command], tmp_path: Path
) -> None:
    worker, run = system
    file = tmp_path / "in.jsonl"
    ids = []
    for content in ("short", "long" * 3000):
        file.write_bytes(jsonl([line(0, "m", content)]))
        status, told, shown = await run("submit", file, "--watch")
        assert status == 0, shown
        assert "0 of 0" not in shown
        assert "null" not in told
        assert json.loads(told)["status"] == "completed"
        ids.append(json.loads(told)["id"])
    status, table, _ = await run("list")
    rows = [each.split()[:6] for each in table.splitlines()]
    assert rows[1:] == [[each, "/v1/chat/completions", "completed", "1", "0", "1"] for each in ids[::-1]], table
    status, told, shown = await run("list", "--limit", 1, "--json")
    assert (json.loads(told)["id"], "the newest 1 batches" in shown) == (ids[1], True)
    status, told, _ = await run("results", ids[0])
    assert (status, json.loads(told)["custom_id"]) == (0, "line-0")
    status, told, shown = await run("results", ids[0], "--errors")
    assert (status, told) == (0, "")
    assert "completed: no errors" in shown
    worker.answer = lambda request: replace(echo(request), finish="failed", error_code="x", error="y")
    file.write_bytes(jsonl([line(0, "m"), line(1, "m")]))
    status, told, shown = await run("submit", file, "--watch")
    assert status == 1
    assert "2 of 2 lines done, completed, 2 of them without an answer" in shown
    errors = (await run("results", json.loads(told)["id"], "--errors"))[1]
    assert [json.loads(each)["custom_id"] for each in errors.splitlines()] == ["line-0", "line-1"]


async def test_refused_batch_leaves_no_file_and_a_failed_one_is_told(
    system: tuple[EchoWorker, Command], tmp_path: Path
) -> None:
    _, run = system
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(0, "m", url="/v1/nonsense")]))
    for options in ((), ("--completion-window", "9d")):
        status, told, shown = await run("submit", file, *options)
        assert (status, told) == (2, ""), shown
    assert list((tmp_path / "files").rglob("*.data")) == []
    file.write_bytes(jsonl([line(0, "m"), line(0, "m")]))
    batch_id = json.loads((await run("submit", file))[1])["id"]
    assert (await run("watch", batch_id))[0] == 1
    for options, expected in ((), 0), (("--follow",), 1):
        status, told, shown = await run("results", batch_id, *options)
        assert (status, told) == (expected, "")
        assert "failed: no answers" in shown


class _Closed(io.BytesIO):
    def write(self, data: Any, /) -> int:
        raise BrokenPipeError


def test_output_that_nobody_reads_is_no_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    response = io.BytesIO(b"{}")
    monkeypatch.setattr(Endpoint, "open", lambda *arguments: response)
    with pytest.raises(BrokenPipeError):
        BatchApi(Endpoint("http://x", None)).download("file-1", 0, _Closed())


def test_server_that_is_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[Any] = iter([ServerRefusedError(0, "away"), ServerRefusedError(503, "busy"), b'{"id": "a"}'])

    def answer(*_: object) -> io.BytesIO:
        found = next(answers)
        if isinstance(found, ServerRefusedError):
            raise found
        return io.BytesIO(found)

    pauses: list[float] = []
    monkeypatch.setattr(Endpoint, "open", answer)
    monkeypatch.setattr("ops.cli.batch_files.time.sleep", pauses.append)
    assert _patiently(BatchApi(Endpoint("http://x", None)), "a") == {"id": "a"}
    assert (len(pauses), capsys.readouterr().err) == (2, "headrace: away; trying again\n")


def test_time_to_go_is_left_out_behind_the_expiry(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter((0.0, 10.0, 20.0, 21.0, 30.0))
    bar = _Bar("done", "lines", lambda: next(moments))
    bar.show(0, 100, False)
    bar.show(10, 100, False, "in_progress", 1000.0)
    bar.show(11, 100, False, "in_progress")  # too soon after the last line
    bar.show(11, 100, False, "in_progress", 1.0)
    _, before, at = capsys.readouterr().err.splitlines()
    assert "about 180 s to go" in before
    assert "to go" not in at


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no file"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"hello", "does not begin with JSON"),
        (b"[]", "a JSON array: write one object a line"),
        (b'{"custom_id": "a"}', "a line without a url"),
        (b"\x1f\x8b\x08\0\xff", "is compressed; unpack it first"),
        (b"\xff\xfe\0secret", "is not text in UTF-8"),
    ],
)
def test_file_that_is_none_of_a_batch_is_refused_before_it_is_uploaded(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "in.jsonl"
    if content is not None:
        file.write_bytes(content)
    found = headrace_here("batch", "submit", str(file), "--url", "http://127.0.0.1:1", "--api-key", "k")
    assert found.returncode == 2
    assert told in found.stderr
    assert "Error(" not in found.stderr
    assert "secret" not in found.stderr
