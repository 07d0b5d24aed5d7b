"""Figures of streams are those of a server whose pace is known; errors are reported, not measured."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.bench.engine import Load
from ops.bench.peers import engines
from ops.bench.peers.engine_script import vllm_generate
from ops.bench.peers.engines import Task, servers
from ops.bench.served import Served, StreamError, measure_streams, serve_streams, token_times
from ops.load_generator.connection import Address, Answer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    event = f'data: {{"id":"1","choices":[{{"index":0,"text": "{text}","logprobs":null}}]}}\n\n'.encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


@pytest.fixture
def paced_server() -> Iterator[Address]:
    """Sixty tokens a stream, one per 10 ms."""
    command = [sys.executable, "-m", "ops.bench.floor_server", "10", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Address("127.0.0.1", int(process.stdout.readline()), "any")
        process.kill()


def test_rate_is_that_of_a_server_with_a_known_pace(paced_server: Address) -> None:
    served = asyncio.run(serve_streams(paced_server, [[3, 4, 5]] * 4, 60))

    # Four streams of a token per 10 ms; a busy machine is late, never early.
    assert 200 <= served.decode_rate <= 420
    assert 0 < served.ttft_p50_s <= served.ttft_max_s < 1


def test_tokens_are_timed_by_the_piece_that_completes_their_text() -> None:
    first, second = chunk(" w3 w4"), chunk(" w5")
    pieces = [(1.0, HEAD + first[:40]), (2.0, first[40:]), (3.0, second), (4.0, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")]

    assert token_times(Answer(0.0, pieces, is_whole=True), 3) == [2.0, 2.0, 3.0]


def test_only_tokens_while_all_streams_decode_count() -> None:
    slow, quick = (0.0, [4.0, 5.0, 6.0, 7.0]), (0.0, [1.0, 2.0, 4.5, 5.5, 6.5])

    served = measure_streams([slow, quick])

    # Between 4.0, when the last one begins, and 6.5, when the first one ends: two tokens and three.
    assert served.decode_rate == 5 / 2.5
    assert (served.ttft_p50_s, served.ttft_max_s) == (2.5, 4.0)
    with pytest.raises(StreamError, match="--new"):
        measure_streams([slow, (0.0, [1.0, 2.0])])


def test_refused_or_short_answers_are_errors() -> None:
    refusal = b'HTTP/1.1 503 Busy\r\ncontent-length: 17\r\n\r\n{"error": "full"}'
    with pytest.raises(StreamError, match="status 503"):
        token_times(Answer(0.0, [(1.0, refusal)]), 8)
    with pytest.raises(StreamError, match="1 tokens, not 8"):
        token_times(Answer(0.0, [(1.0, HEAD + chunk(" w3") + b"0\r\n\r\n")]), 8)
    with pytest.raises(StreamError, match="9 tokens, not 8"):
        token_times(Answer(0.0, [(1.0, HEAD + 9 * chunk(" w3") + b"0\r\n\r\n")]), 8)
    with pytest.raises(StreamError, match="closed without an answer"):
        token_times(Answer(0.0), 8)
    with pytest.raises(StreamError, match="not HTTP: 'Segmentation fault'"):
        token_times(Answer(0.0, [(1.0, b"Segmentation fault")]), 8)


def test_server_that_is_gone_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        with pytest.raises(StreamError, match=f"127.0.0.1:{port} takes no connection: Connect"):
            asyncio.run(serve_streams(Address("127.0.0.1", port, "any"), [[3]], 8))


def test_peer_has_room_for_the_largest_load_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    @contextmanager
    def note(command: list[str], environ: object) -> Iterator[None]:
        commands.append(command)
        yield

    monkeypatch.setattr(engines, "_running", note)
    monkeypatch.setattr(engines, "vllm_python", lambda home: home / "python")
    (vllm,) = (server for server in servers(Path("."), Path("."), "BF16") if server.name == "vLLM CPU")
    with vllm.run(Task(Path("."), [Load(32, 512, 64), Load(1, 512, 64)], 2)):
        (command,) = commands

    assert command[command.index("--max-num-seqs") + 1] == "32"


@pytest.mark.parametrize(("prompt", "tokens"), [(16, 512), (1000, 1000)])
def test_vllm_takes_a_whole_prompt_in_a_step_and_no_fewer_tokens_than_it_may(
    monkeypatch: pytest.MonkeyPatch, prompt: int, tokens: int
) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda model, **options: made.append(options)))
    vllm_generate("m", 2000, 4, prompt)
    assert [(each["max_num_batched_tokens"], each["max_num_seqs"]) for each in made] == [(tokens, 4)]


def test_llama_cpp_is_built_once_of_the_sources_that_pip_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], timeout_s: float) -> str:
        commands.append(command)
        if "download" in command:
            sources = tmp_path / "llama_cpp_python-1" / "vendor" / "llama.cpp"
            sources.mkdir(parents=True)
            (tmp_path / "src").mkdir()
            with tarfile.open(tmp_path / "src" / "llama_cpp_python-1.tar.gz", "w:gz") as archive:
                archive.add(tmp_path / "llama_cpp_python-1", "llama_cpp_python-1")
        if "--target" in command:
            (tmp_path / "build" / "bin").mkdir(parents=True)
            (tmp_path / "build" / "bin" / command[command.index("--target") + 1]).touch()
        return ""

    monkeypatch.setattr(engines, "run_program", run)
    for _ in range(2):
        assert engines.llama_program(tmp_path, "llama-quantize") == tmp_path / "build" / "bin" / "llama-quantize"
    assert [command[:4] for command in commands] == [
        [sys.executable, "-m", "pip", "download"],
        ["cmake", "-S", str(tmp_path / "src" / "llama_cpp_python-1" / "vendor" / "llama.cpp"), "-B"],
        ["cmake", "--build", str(tmp_path / "build"), "--target"],
    ]
    assert engines.llama_version(tmp_path) == "llama_cpp_python-1"


def test_figures_beside_the_rate_are_milliseconds_and_the_engine_alone_where_it_was_measured() -> None:
    times = {"ttft_p50_ms": 250.0, "ttft_max_ms": 400.0}
    assert Served(5.0, 0.25, 0.4).others() == times
    assert Served(5.0, 0.25, 0.4, 9.96).others() == {**times, "engine_alone_tokens_per_s": 10.0}
