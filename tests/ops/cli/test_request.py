"""`headrace request` and `headrace top` say which options and which port are wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import ops.cli.request
from gateway.timelines.view import view_of
from ops.cli import running_system, top
from ops.cli.running_system import OperatorAccess, ServerRefusedError
from ops.stack.state import ReadyFile, write_ready_file
from tests.gateway.timelines.test_view import timeline
from tests.ops.cli.command import headrace_here


@pytest.mark.parametrize("command", [("request", "my-request"), ("top", "--once")])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:1/v1", "http://localhost:1/"])
def test_public_port_instead_of_the_operators_is_named(tmp_path: Path, command: tuple[str, ...], url: str) -> None:
    nats = "nats://127.0.0.1:3"
    metrics_url = "http://127.0.0.1:2/metrics"
    ready = ReadyFile("http://127.0.0.1:1", "k", nats, nats, None, metrics_url, "o", {"gateway": [os.getpid()]})
    write_ready_file(tmp_path / "ready.json", ready)
    done = headrace_here(*command, "--operator-url", url, "--state-dir", str(tmp_path))
    problem = f"headrace: --operator-url: {url} is the public port; the operator's is http://127.0.0.1:2\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", problem)


@pytest.mark.parametrize(("given", "running", "shown"), [(None, "o", "o"), ("g", "o", "g"), (None, "", None)])
def test_operators_port_is_shown_the_key_that_is_given_or_that_of_the_running_system_if_it_has_one(
    tmp_path: Path, given: str | None, running: str, shown: str | None
) -> None:
    nats, pids = "nats://127.0.0.1:3", {"gateway": [os.getpid()]}
    ready = ReadyFile("http://127.0.0.1:1", "k", nats, nats, None, "http://127.0.0.1:2/metrics", running, pids)
    write_ready_file(tmp_path / "ready.json", ready)
    endpoint = running_system.find_operator(OperatorAccess(operator_key=given, state_dir=tmp_path))
    assert (endpoint.url, endpoint.api_key) == ("http://127.0.0.1:2", shown)


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("abc", 100)])
def test_bars_are_as_wide_as_the_terminal(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = msgspec.to_builtins(view_of(timeline(), None))
    operator = SimpleNamespace(call=lambda *_: {"requests": [view]})
    monkeypatch.setattr(ops.cli.request, "find_operator", lambda _: operator)
    shown = headrace_here("request", "r", COLUMNS=columns)
    assert shown.returncode == 0, shown.stderr
    [scale] = [line for line in shown.stdout.splitlines() if line.endswith("4.10 s") and line.strip().startswith("0")]
    assert len(scale) == width


def test_empty_id_is_refused() -> None:
    refused = headrace_here("request", "")
    assert (refused.returncode, "ID is empty" in refused.stderr) == (2, True)


def test_worker_that_takes_nothing_is_cordoned_or_drains_and_ends() -> None:
    assert top._state({"draining": True, "role": "both"}) == "role both; cordoned"
    assert top._state({"draining": True, "role": None, "is_ending": True}) == "draining, then ends"
    assert top._state({"draining": False}) == ""


def test_role_and_wrong_answers_of_a_worker_are_its_state() -> None:
    assert top._state({"draining": False, "role": None}) == ""
    golden = {"problem": "2 of 8 differ", "has_withdrawn": True}
    told = top._state({"draining": True, "role": "decode", "golden": golden})
    assert told == "role decode; withdrawn: 2 of 8 differ"


def test_ids_are_listed_whole_and_orders_exclude_each_other() -> None:
    line = {"tenant": "t", "status": 200, "outcome": "completed", "ended_s": 1.0}
    heads, first, second = ops.cli.request._list([line | {"id": "chatcmpl-" + "x" * 60}, line | {"id": "short"}])
    assert first.split()[0] == "chatcmpl-" + "x" * 60
    assert heads.index("TENANT") == first.index(" t ") + 1 == second.index(" t ") + 1
    assert next(ops.cli.request._list([])).startswith("ID ")
    running = next(islice(ops.cli.request._list([line | {"id": "r", "status": 0, "outcome": "running"}]), 1, None))
    assert running.split() == ["r", "t", "running", "1.00", "s", "0", "0"]
    failed = line | {"id": "f", "status": 503, "outcome": "refused", "code": "overloaded"}
    assert [row.split()[-1] for row in ops.cli.request._list([failed])] == ["ERROR", "overloaded"]
    refused = headrace_here("request", "--running", "--first")
    assert (refused.returncode, "Give --first or --running, not both." in refused.stderr) == (2, True)


@pytest.fixture
def operator_port() -> Iterator[tuple[str, list[bytes | None]]]:
    """A port that gives its answers in turn, the last one for ever: None says nothing and keeps the connection."""
    answers: list[bytes | None] = []

    def serve() -> None:
        with contextlib.ExitStack() as kept:
            while True:
                connection = kept.enter_context(listener.accept()[0])
                if not answers:
                    return
                connection.recv(65_536)
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", answers
        answers.clear()
        socket.create_connection(listener.getsockname()).close()
        thread.join()


def test_top_goes_on_after_a_look_that_fails(
    operator_port: tuple[str, list[bytes | None]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = operator_port
    state = json.dumps({"at": 1.0, "queues": [], "workers": [], "gateways": []}).encode()
    good = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(state), state)
    answers += [good, b"", good[:-5], good, good]
    looks = iter(range(5))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        top.run(top.TopConfig(operator_url=url))
    shown = capsys.readouterr()
    assert shown.out.count("GATEWAY") == 3
    assert [url in line for line in shown.err.splitlines()] == [True, True]


def test_operators_port_that_says_nothing_is_given_up(
    operator_port: tuple[str, list[bytes | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = operator_port
    answers.append(None)
    monkeypatch.setattr(running_system, "_OPERATOR_TIMEOUT_S", 0.1)
    with pytest.raises(ServerRefusedError, match="does not answer"):
        top.run(top.TopConfig(operator_url=url, once=True))


@pytest.mark.parametrize(("energy", "shown", "told"), [({}, "-", "null"), ({"energy_mj": 1500}, "1.500", "1500")])
def test_energy_that_no_device_tells_is_a_dash(
    energy: dict[str, int], shown: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operator:
        def call(self, _method: str, _path: str) -> dict[str, Any]:
            return {"use": [{"tenant": "t", "model": "m", "lane": "batch", "requests": 1, **energy}]}

    def find(_access: OperatorAccess) -> Operator:
        return Operator()

    monkeypatch.setattr(top, "find_operator", find)
    table = CliRunner().invoke(top.USAGE, [], catch_exceptions=False)
    assert table.output.splitlines()[1].split()[-2:] == ["0.000", shown]
    line = CliRunner().invoke(top.USAGE, ["--json"], catch_exceptions=False)
    assert line.output.rstrip().endswith(f'"energy_mj": {told}}}')
