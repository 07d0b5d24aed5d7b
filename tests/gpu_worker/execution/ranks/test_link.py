"""Only those who know the group's token are talked to, and nobody changes what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch
from msgspec.msgpack import Decoder

from gpu_worker.execution.ranks import link as link_module
from gpu_worker.execution.ranks.link import Link, LinkError, LinkListener, connect
from gpu_worker.execution.ranks.meeting import ProcessGroupRanks
from gpu_worker.execution.runner_config import RunnerConfig
from tests.cable import connected_host

TOKEN = "a token of a group in a test"
NUMBERS, TEXT = Decoder(list[int]), Decoder(str)


class Admitted:
    def __init__(self, address: str = "127.0.0.1") -> None:
        self.links: SimpleQueue[tuple[int, Link]] = SimpleQueue()
        self.all: list[Link] = []
        self.lock = threading.Lock()
        self.is_closed = False
        self.address = address
        self.listener = LinkListener(address, 0, TOKEN, self.admit)

    def admit(self, node: int, link: Link) -> bool:
        with self.lock:
            # A host learns that it is welcome before `admit` is called, so a test may be over by then.
            if node == 9 or self.is_closed:
                return False
            self.links.put((node, link))
            self.all.append(link)
            return True

    def close(self) -> None:
        self.listener.close()
        with self.lock:
            self.is_closed = True
        for link in self.all:
            link.close()


@pytest.fixture
def admitted() -> Iterator[Admitted]:
    admitted = Admitted()
    yield admitted
    admitted.close()


def test_messages_arrive_in_order_both_ways(admitted: Admitted) -> None:
    there = connect("127.0.0.1", admitted.listener.port, TOKEN, 3, 5)
    node, here = admitted.links.get(timeout=5)
    assert node == 3
    for sender, receiver in ((there, here), (here, there)):
        for number in range(20):
            sender.send(msgspec.msgpack.encode([number] * 1000 * number))
        assert [receiver.receive(NUMBERS) for _ in range(20)] == [[number] * 1000 * number for number in range(20)]
    there.close()
    assert here.receive(NUMBERS) is None
    here.close()


def test_wrong_token_is_told_to_who_has_it_and_is_not_admitted(
    admitted: Admitted, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LinkError, match="does not know the token of this group") as refused:
        connect("127.0.0.1", admitted.listener.port, "another token of a test", 1, 5)
    assert refused.value.is_final
    assert admitted.links.empty()


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64, link_module._HELLO.pack(link_module._MAGIC, 1, bytes(32))],
)
def test_stranger_who_says_something_else_gets_nothing(
    admitted: Admitted, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", admitted.listener.port)) as stranger:
        stranger.settimeout(5)
        answer = b""
        # Who is refused with bytes unread is told by a reset, be it before the end has been sent.
        with contextlib.suppress(OSError):
            stranger.sendall(said + bytes(32))
            stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(1000):
                answer += piece
    # A nonce and a proof at most, which say nothing without the token.
    assert len(answer) in (0, 64)
    assert admitted.links.empty()


def test_many_silent_strangers_do_not_keep_a_host_out(admitted: Admitted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_HANDSHAKE_S", 0.3)
    strangers = [socket.create_connection(("127.0.0.1", admitted.listener.port)) for _ in range(40)]
    deadline = time.monotonic() + 10
    while True:
        try:
            connect("127.0.0.1", admitted.listener.port, TOKEN, 1, 1).close()
            break
        except (OSError, LinkError):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    for stranger in strangers:
        stranger.close()


class Between:
    """Passes bytes on from one end to the other, and changes one of them."""

    def __init__(self, port: int, position: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._position = position
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listener:
            one, _ = self._listener.accept()
            with one, socket.create_connection(("127.0.0.1", self._target)) as other:
                threading.Thread(target=self._pass, args=(other, one, None), daemon=True).start()
                self._pass(one, other, self._position)

    def _pass(self, source: socket.socket, target: socket.socket, position: int | None) -> None:
        seen = 0
        while data := bytearray(_received(source)):
            if position is not None and seen <= position < seen + len(data):
                data[position - seen] ^= 1
            seen += len(data)
            with contextlib.suppress(OSError):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _received(source: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return source.recv(4096)
    return b""


def test_message_that_was_changed_on_its_way_is_refused(admitted: Admitted) -> None:
    handshake = link_module._HELLO.size + link_module._PROOF_BYTES
    between = Between(admitted.listener.port, handshake + link_module._HEAD.size + 3)
    there = connect("127.0.0.1", between.port, TOKEN, 1, 5)
    _, here = admitted.links.get(timeout=5)
    there.send(msgspec.msgpack.encode("a plan"))
    with pytest.raises(LinkError, match="changed on its way"):
        here.receive(TEXT)
    there.close()
    here.close()


def test_host_that_is_not_one_of_the_group_is_let_go(admitted: Admitted, caplog: pytest.LogCaptureFixture) -> None:
    link = connect("127.0.0.1", admitted.listener.port, TOKEN, 9, 5)
    assert link.receive(TEXT) is None
    link.close()


# Receives until the end, and says what came, and when: the clock is that of all processes.
OTHER_END = """
import sys, time
from msgspec.msgpack import Decoder
from gpu_worker.execution.ranks.link import connect
link = connect(sys.argv[1], int(sys.argv[2]), sys.argv[3], 1, 5)
while (message := link.receive(Decoder(bytes))) is not None:
    print(len(message), flush=True)
print(time.monotonic(), flush=True)
"""


@contextlib.contextmanager
def other_end(admitted: Admitted, *prefix: str) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """Connect another process, which is started behind a prefix."""
    port = admitted.listener.port
    command = (*prefix, sys.executable, "-c", OTHER_END, admitted.address, str(port), TOKEN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield admitted.links.get(timeout=60)[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


@pytest.mark.slow
def test_both_ends_of_a_cable_that_was_pulled_out_notice_within_a_second_and_a_half() -> None:
    with (
        connected_host() as cable,
        contextlib.closing(Admitted(cable.address)) as admitted,
        other_end(admitted, *cable.there()) as (link, process),
    ):
        # Ends that have nothing to say stay connected.
        time.sleep(3)
        link.send(msgspec.msgpack.encode(b"still there"))
        assert said(process) == 11
        pulled = time.monotonic()
        cable.pull()
        assert link.receive(TEXT) is None
        assert time.monotonic() - pulled < 1.5
        assert said(process) - pulled < 1.5


@pytest.mark.slow
def test_idle_connection_outlasts_moments_in_which_packets_are_lost() -> None:
    with (
        connected_host() as cable,
        contextlib.closing(Admitted(cable.address)) as admitted,
        other_end(admitted, *cable.there()) as (link, process),
    ):
        # Of what is sent each second something is lost sooner or later.
        for _ in range(12):
            cable.drop(is_dropping=True)
            time.sleep(0.25)
            cable.drop(is_dropping=False)
            time.sleep(0.6)
        link.send(msgspec.msgpack.encode(b"still there"))
        assert said(process) == 11


@pytest.mark.slow
def test_end_that_is_stopped_while_more_is_sent_than_the_connection_holds_stays_connected(admitted: Admitted) -> None:
    with other_end(admitted) as (link, process):
        os.kill(process.pid, signal.SIGSTOP)
        message = msgspec.msgpack.encode(bytes(64 << 20))
        sending = threading.Thread(target=link.send, args=(message,))
        sending.start()
        time.sleep(3)
        assert sending.is_alive()
        os.kill(process.pid, signal.SIGCONT)
        assert said(process) == 64 << 20
        sending.join()


def test_ranks_listen_on_loopback_alone_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    ranks = ProcessGroupRanks(0, RunnerConfig(Path()))
    ranks.join(str(tmp_path / "store"))
    try:
        assert ranks.gather(torch.ones(2, 3)).tolist() == torch.ones(2, 3).tolist()
        assert os.environ.pop("NCCL_SOCKET_IFNAME") in ("lo", "lo0")
    finally:
        ranks.leave()
