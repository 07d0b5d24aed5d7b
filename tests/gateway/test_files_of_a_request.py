"""The files that a streamed chat passes in the gateway, from socket to socket: few, and those that the page lists.

A gateway process notes each function that runs for a request: one that is called, however deeply, from where bytes of
the client or frames of the worker come in, from the request's task, or from the flush. What runs beside does not count.
"""

from __future__ import annotations

import asyncio
import signal
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.gateway.gateway_process import starting_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import until

MAX_FILES = 76
PAGE = ROOT / "ops" / "docs" / "architecture.md"
NOTING = """
import signal
import sys
from pathlib import Path

from gateway.__main__ import run

ROOT, FILE = Path.cwd(), Path(sys.argv[1])
ENTRANCES = {"Connection.buffer_updated", "HandlerRunner._run", "FrameReceiver.receive", "Flusher._flush"}
found, is_ours = set(), {}


def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or code in found or code.co_name == "<module>":
        return
    if code not in is_ours:
        is_ours[code] = code.co_filename.startswith((f"{ROOT}/gateway/", f"{ROOT}/shared/"))
    while is_ours[code] and frame is not None:
        if frame.f_code.co_qualname in ENTRANCES:
            found.add(code)
            return
        frame = frame.f_back


def begin(number, frame):
    sys.setprofile(note)
    print("notes functions", file=sys.stderr, flush=True)


signal.signal(signal.SIGUSR2, begin)
status = run()
sys.setprofile(None)
FILE.write_text("".join(f"{Path(code.co_filename).relative_to(ROOT)}\\n" for code in found))
sys.exit(status)
"""


async def files_of_a_request(nats_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.chdir(ROOT)
    notes = directory / "notes"
    with starting_gateway(directory, nats_url, ("-c", NOTING, str(notes))) as gateway:
        await until(lambda: " serving " in gateway.log, 60)
        async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
            serving = asyncio.create_task(worker.serve(0.001))
            # What is made once is made by the first, before functions are noted.
            for number in (1, 2):
                messages = [{"role": "user", "content": "hi"}]
                body = {"model": worker.model, "messages": messages, "stream": True, "max_tokens": 8}
                client.post("/v1/chat/completions", body)
                assert (await client.head())[0] == 200
                await client.stream()
                await until(lambda number=number: gateway.log.count("outcome=completed") == number)
                if number == 1:
                    gateway.process.send_signal(signal.SIGUSR2)
                    await until(lambda: "notes functions" in gateway.log)
            serving.cancel()
    return set(notes.read_text().split())


def listing(files: set[str]) -> str:
    """Return the page's list: a line for each room."""
    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for room, _, name in (file.rpartition("/") for file in sorted(files)):
        rooms[room].append(name.removesuffix(".py"))
    lines = (f"- `{room}`: {', '.join(names)}." for room, names in rooms.items())
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="  ") for line in lines)


async def test_streamed_chat_passes_few_files_and_the_page_lists_them(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = await files_of_a_request(nats_url, tmp_path, monkeypatch)
    assert "gateway/api/generation_service.py" in files
    assert len(files) <= MAX_FILES, sorted(files)
    expected = listing(files)
    assert expected in PAGE.read_text(), f"write this into {PAGE}, in the place of the list there:\n{expected}"
