"""A group of two hosts: processes with other folders, on loopback or with a cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock, call

import msgspec
import pytest

from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError
from gpu_worker.execution.ranks import messages
from gpu_worker.execution.ranks import node as node_module
from gpu_worker.execution.ranks import remote as remote_module
from gpu_worker.execution.ranks.link import connect
from gpu_worker.execution.ranks.remote import Remote, RemoteHost, _RemoteProcess
from ops.stack.child import children_of
from shared.errors import ConfigError
from tests.cable import connected_host
from tests.gpu_worker.execution.engine_run import save_tiny_model
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_group import assert_same, begin, replace_rank, sequences
from tests.gpu_worker.models.variants import save_variant
from tests.waiting import wait_for

ROOT = Path(__file__).parents[4]
TOKEN = "a token of a group in a test"


@contextmanager
def host(
    folder: Path, model: Path, remote: Remote, size: int, token: str = TOKEN, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run another host behind a prefix, with the model at a place of its own."""
    folder.mkdir()
    if not (own := folder / "weights").exists():
        shutil.copytree(model, own)
    arguments = (str(own), remote.address, str(remote.port), "1", str(size), "2")
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.gpu_worker.execution.ranks.node_process", *arguments],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "HR_TOKEN": token},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    remote = Remote("127.0.0.1", 0, TOKEN, 2)
    yield remote
    remote.close()


@pytest.mark.slow
def test_ranks_on_two_hosts_give_the_tokens_of_one_also_after_deaths_on_both(tmp_path: Path, remote: Remote) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_variant("llama", model)
    with started(model, 1) as (alone, _):
        expected = alone.answer(sequences())
    with host(tmp_path / "first", model, remote, 4) as first, started(model, 4, remote, nnodes=2) as (run, group):
        assert group is not None
        assert_same(run.answer(sequences()), expected)
        replace_rank(run, group, 2, signal.SIGSTOP)
        replace_rank(run, group, 1, signal.SIGKILL)
        assert [each.loads for each in group.readings()] == [1, 2, 2, 1]
        assert_same(run.answer(sequences()), expected)
        # The whole host dies, and another one takes its place.
        before = group.pids
        first.kill()
        wait_for(lambda: group.lost)
        assert "of host 1) is lost: the host is gone" in str(group.lost)
        with host(tmp_path / "second", model, remote, 4):
            group.reform(run.own.num_blocks, run.own.restart)
            assert_same(run.answer(sequences()), expected)
            assert [rank for rank, pid in group.pids.items() if pid != before[rank]] == [2, 3]
        wait_for(lambda: group.lost)
        # A worker that ends does not wait for hosts that may come back.
        began = time.monotonic()
        threading.Timer(0.5, group.stop_forming).start()
        with pytest.raises(BrokenRunnerError, match="the worker ends"):
            group.reform(run.own.num_blocks, run.own.restart)
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_host_that_takes_nothing_any_more_is_missed_in_time_and_serves_again(tmp_path: Path, remote: Remote) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_tiny_model(model)
    with started(model, 1) as (alone, _):
        expected = alone.answer(sequences())
    with host(tmp_path / "first", model, remote, 2) as process, started(model, 2, remote, nnodes=2) as (run, group):
        assert group is not None
        lost: list[float] = []
        group.on_lost = lambda: lost.append(time.monotonic())
        frozen = (*children_of(process.pid), process.pid)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        hurt = time.monotonic()
        # More than the connection holds.
        sending = threading.Thread(target=group.send, args=([bytes(64 << 20)],))
        sending.start()
        wait_for(lambda: lost)
        assert lost[0] - hurt < 1.5
        sending.join(5)
        assert not sending.is_alive()
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        # It finds that it was cut off, ends its rank, and connects again.
        group.reform(run.own.num_blocks, run.own.restart)
        assert_same(run.answer(sequences()), expected)
        assert [each.loads for each in group.readings()] == [1, 1]


@pytest.mark.slow
def test_host_whose_cable_was_pulled_out_is_missed_in_time_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_tiny_model(model)
    with started(model, 1) as (alone, _):
        expected = alone.answer(sequences())
    with connected_host() as cable, closing(Remote(cable.address, 0, TOKEN, 2)) as remote:
        # There is one group a process but in tests, whose first one would decide.
        for backend in ("GLOO", "NCCL"):
            monkeypatch.setenv(f"{backend}_SOCKET_IFNAME", cable.interface)
        plugged = host(tmp_path / "first", model, remote, 2, prefix=cable.there())
        with plugged as process, started(model, 2, remote, nnodes=2) as (run, group):
            assert group is not None
            steps = begin(run)
            for _ in range(5):
                next(steps)
            cable.pull()
            pulled = time.monotonic()
            with pytest.raises(InterruptedRunnerError, match="of host 1"):
                deque(steps)
            assert time.monotonic() - pulled < 1.5
            # The other host finds out by itself, and ends its rank.
            wait_for(lambda: not children_of(process.pid), 2)
            cable.plug_in()
            group.reform(run.own.num_blocks, run.own.restart)
            assert_same(run.answer(sequences()), expected)
            assert [each.loads for each in group.readings()] == [1, 1]


def test_rank_of_a_silent_host_is_not_taken_for_one_that_wants_a_core(remote: Remote) -> None:
    host = remote.hosts[1]
    with closing(connect("127.0.0.1", remote.port, TOKEN, 1, 5)) as link, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(host.start, 1, lambda *_: None)
        assert link.receive(messages.TO_NODE) == messages.StartRank(1)
        link.send(msgspec.msgpack.encode(messages.Started(1, 7)))
        rank = starting.result(5)
        for is_busy in (False, True):
            beats = [messages.Beat(1, ticks=5, step=1, loads=1, is_starved=True)]
            link.send(msgspec.msgpack.encode(messages.Pulse(beats, is_busy)))
            wait_for(lambda: host.pulse)
            wait_for(lambda wanted=is_busy: host.is_busy == wanted)
            wait_for(lambda: host.silent_s > 0.2)
            assert rank.is_starved == is_busy


def test_rank_of_another_host_has_time_to_leave_before_it_is_killed() -> None:
    host = Mock()
    for leaves_after_s, killed in ((0.2, []), (0.6, [call(messages.KillRank(1))])):
        rank = _RemoteProcess(1, 7, host, lambda *_: None)
        leaving = threading.Timer(leaves_after_s, rank.end, ["it has left"])
        leaving.start()
        rank.close(0.4)
        leaving.join()
        assert host.send.mock_calls == killed


@pytest.mark.slow
def test_host_with_another_model_is_refused_on_both(tmp_path: Path, remote: Remote) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        save_tiny_model(tmp_path / name)
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05") + " ")
    with host(tmp_path / "first", tmp_path / "other", remote, 2) as process:
        reason = r"is 2, but rank 1 has another revision of the model: \w+, and rank 0"
        with pytest.raises(ConfigError, match=reason), started(tmp_path / "model", 2, remote, nnodes=2):
            pass
        assert process.stderr is not None
        assert process.wait(10) == 1
        assert "the group does not start: " in (said := process.stderr.read())
        assert "rank 1 has another revision of the model" in said


@pytest.mark.slow
def test_host_with_another_token_is_refused_on_both(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_module, "COMING_S", 8.0)
    model = tmp_path / "model"
    model.mkdir()
    save_tiny_model(model)
    with host(tmp_path / "first", model, remote, 2, "another token of a test") as process:
        reason = "is 2, but host 1 did not connect within 8 s"
        with pytest.raises(ConfigError, match=reason), started(model, 2, remote, nnodes=2):
            pass
        assert process.stderr is not None
        assert process.wait(10) == 1
        assert "does not know the token of this group" in process.stderr.read()
    assert any("refused a connection of 127.0.0.1" in record.getMessage() for record in caplog.records)


def test_host_whose_rank_0_never_comes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "COMING_S", 0.3)
    began = time.monotonic()
    node = node_module.Node.__new__(node_module.Node)
    with pytest.raises(node_module.DependencyError, match=r"rank 0 at 127\.0\.0\.1:1: no answer within 0\.3 s: "):
        node.serve("127.0.0.1", 1, TOKEN, 1)
    assert time.monotonic() - began < 3


def test_host_that_connects_while_the_worker_ends_is_let_go(remote: Remote) -> None:
    host = RemoteHost(1)
    # Its handshake was under way, so `close` knew of no link to end.
    host.close()
    with closing(connect("127.0.0.1", remote.port, TOKEN, 1, 5)) as link:
        assert not host.attach(link)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_interface_is_found_by_its_address() -> None:
    assert node_module.interface_of("127.0.0.1") == "lo"
    assert node_module.interface_of("192.0.2.1") == ""
