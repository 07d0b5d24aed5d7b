"""KV that is read by NIXL in another worker's memory: what is damaged, dead, slow, or has no NIXL costs time alone."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from gpu_worker.execution.tiers import nixl_transport, peer_wire, shared_memory
from gpu_worker.execution.tiers.nixl_transport import NixlAgent, NixlError, NixlSender, make_agent
from tests.gpu_worker.execution.test_kv_transfer import (  # noqa: F401
    WAYS,
    Answer,
    Pair,
    expected,
    make_pair,
)
from tests.waiting import wait_for

pytest.importorskip("nixl", reason="NIXL does not support this platform")

ROW_BYTES = 4096
PATIENCE_S = 60.0
"""UCX has threads of its own, which wait for a core where others have them all."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_wire, "FRAME_S", PATIENCE_S)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlAgent]:
    # By any shorter way the kernel reads the memory of a process that stands still.
    monkeypatch.setenv("UCX_TLS", "tcp")
    own = np.zeros(1, np.uint8)
    agent = NixlAgent([(own.ctypes.data, 1)], ROW_BYTES)
    yield agent
    agent.close()


@contextmanager
def other_worker() -> Iterator[tuple[subprocess.Popen[str], bytes, int]]:
    """Yield a process with memory that NIXL may read, its description, and where it begins."""
    code = f"""
        import select, sys, numpy as np
        from gpu_worker.execution.tiers.nixl_transport import NixlAgent
        memory = np.full({ROW_BYTES}, 7, np.uint8)
        agent = NixlAgent([(memory.ctypes.data, memory.nbytes)], 1)
        print(agent.description.hex(), memory.ctypes.data, flush=True)
        with agent.being_read():
            select.select([sys.stdin], (), ())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        description, place = process.stdout.readline().split()
        try:
            yield process, bytes.fromhex(description), int(place)
        finally:
            process.kill()


def read(agent: NixlAgent, name: bytes, place: int) -> bytes:
    row = bytearray(ROW_BYTES)
    agent.read(name, place, memoryview(row))
    return bytes(row)


def test_a_damaged_description_is_not_given_to_nixl(reader: NixlAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)

    def fail(shown: bytes) -> None:
        pytest.fail("NIXL may end the process")

    monkeypatch.setattr(reader._agent, "add_remote_agent", fail)
    for _ in range(300):
        damaged = bytearray(reader.description)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        for each in (damaged, damaged[: rng.randrange(len(damaged))]):
            with pytest.raises(NixlError, match="damaged"):
                reader.connect(bytes(each))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_or_stands_still_costs_a_second_and_no_row(
    reader: NixlAgent, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_worker() as (process, description, place):
        name = reader.connect(description)
        assert read(reader, name, place) == bytes([7]) * ROW_BYTES
        os.kill(process.pid, ending)
        monkeypatch.setattr(peer_wire, "FRAME_S", 0.5)
        for _ in range(2):
            with contextlib.suppress(NixlError):
                # UCX may be able to read the memory of a process that only stands still.
                row = read(reader, name, place)
                assert (ending, row) == (signal.SIGSTOP, bytes([7]) * ROW_BYTES)
        monkeypatch.setattr(peer_wire, "FRAME_S", PATIENCE_S)
        if ending is signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
            assert read(reader, reader.connect(description), place) == bytes([7]) * ROW_BYTES
    with other_worker() as (_, description, place):
        name = reader.connect(description)
        for _ in range(2 * len(reader._rows)):
            assert read(reader, name, place) == bytes([7]) * ROW_BYTES


class CountingAgent:
    """The part of NIXL that knows other workers: `known` holds their names, `num_progressed` is its polls."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.num_progressed = 0
        self.released: list[object] = []

    def add_remote_agent(self, shown: bytes) -> bytes:
        assert shown[:8] not in self.known or shown.endswith(b"liar")
        self.known.add(shown[:8])
        return shown[:8]

    def remove_remote_agent(self, name: bytes) -> None:
        self.known.discard(name)

    def get_new_notifs(self) -> None:
        self.num_progressed += 1

    def check_xfer_state(self, handle: object) -> str:
        raise RuntimeError("the transfer has failed")


def description(number: int, end: bytes = b"") -> bytes:
    shown = b"%08d" % number + end
    return nixl_transport._CHECKSUM.pack(zlib.crc32(shown)) + shown


def test_worker_whose_memory_is_being_read_is_forgotten_for_no_other(
    reader: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = CountingAgent()
    monkeypatch.setattr(reader, "_agent", fake)
    monkeypatch.setattr(nixl_transport, "_MAX_KNOWN", 4)
    used = reader.connect(description(0))
    for number in range(1, 20):
        reader.release(reader.connect(description(number)))
        # Connected to again and again, so it is never the one that was used least recently.
        reader.release(reader.connect(description(1)))
        assert {used, b"00000001"} <= fake.known
        assert len(fake.known) == min(4, number + 1)
    in_use = [reader.connect(description(number)) for number in (1, 50, 51)]
    with pytest.raises(NixlError, match="too many"):
        reader.connect(description(52))
    reader.release(in_use[1])
    assert reader.connect(description(52)) in fake.known
    assert used in fake.known


def test_worker_that_has_the_name_of_another_is_not_read(reader: NixlAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = CountingAgent()
    monkeypatch.setattr(reader, "_agent", fake)
    reader.release(reader.connect(description(1)))
    with pytest.raises(NixlError, match="name of another"):
        reader.connect(description(1, b"liar"))
    assert not fake.known, "NIXL may mean either by the name"
    assert reader.connect(description(1)) in fake.known


def test_row_of_a_transfer_that_has_failed_is_free_again_and_the_transfer_released(
    reader: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_agent", CountingAgent())
    handles = [Mock(), Mock(release=Mock(side_effect=RuntimeError))]
    reader._begun, reader._free = [(handle, number) for number, handle in enumerate(handles)], []
    assert reader._has_row()
    assert (reader._free, reader._begun) == ([0, 1], [])
    for handle in handles:
        handle.release.assert_called_once_with()


def test_many_leases_are_waited_for_at_the_cost_of_one(reader: NixlAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, ends = CountingAgent(), [socket.socketpair() for _ in range(16)]
    monkeypatch.setattr(reader, "_agent", fake)
    waiting = [threading.Thread(target=NixlSender(end, reader).wait, args=(60.0,)) for end, _ in ends]
    for thread in waiting:
        thread.start()
    wait_for(lambda: reader._num_readers == len(ends))
    begun, count = time.monotonic(), fake.num_progressed
    time.sleep(0.2)
    # One thread polls, with a pause of a millisecond, however many connections wait.
    assert 1 <= fake.num_progressed - count <= 2 + (time.monotonic() - begun) / nixl_transport._PROGRESS_S
    for _, end in ends:
        end.close()
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
    count = fake.num_progressed
    time.sleep(0.1)
    assert fake.num_progressed <= count + 1, "without a lease it rests"
    for end, _ in ends:
        end.close()


@pytest.mark.parametrize("has_nixl", [(True, False), (False, True)], ids=["prefill", "decode"])
def test_kv_comes_over_tcp_where_one_of_two_workers_has_nixl(
    has_nixl: tuple[bool, bool],
    make_pair: Callable[..., Pair],  # noqa: F811
    expected: Answer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "connect", lambda *_: None)
    pair = make_pair(nixl=has_nixl)
    begun, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    (session,) = pair.fetching.peers._sessions.values()
    assert session.way == WAYS["stream"]
    assert pair.go_on(begun) == (expected, 60)


def test_kv_comes_over_tcp_from_a_worker_whose_memory_nixl_could_not_read(
    make_pair: Callable[..., Pair],  # noqa: F811
    expected: Answer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "connect", lambda *_: None)
    pair = make_pair(nixl=(True, True))
    begun, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    assert pair.fetching._nixl is not None
    # No network leads there.
    monkeypatch.setattr(pair.fetching._nixl._agent, "initialize_xfer", unreachable)
    assert pair.go_on(begun) == (expected, 0), "the prompt is computed"
    pair.decode.fill()
    begun, gone = pair.begin()
    pair.fetching.peers.close("r", 1)
    assert pair.open(pair.grant(gone))
    (session,) = pair.fetching.peers._sessions.values()
    assert session.way == WAYS["stream"]


def unreachable(*_: object) -> None:
    raise RuntimeError("no path")


def test_without_nixl_or_rdma_or_where_it_does_not_run_there_is_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no plugins")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(nixl_transport, "NixlAgent", fail)
    monkeypatch.setattr(nixl_transport, "_RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert make_agent([], 1) is None
    assert "no RDMA device" in caplog.text
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert make_agent([], 1) is None
    assert "no plugins" in caplog.text
    monkeypatch.delenv("UCX_TLS")
    (tmp_path / "mlx5_0").mkdir()
    caplog.clear()
    assert make_agent([], 1) is None
    assert "no plugins" in caplog.text
    monkeypatch.setattr(nixl_transport.importlib.util, "find_spec", lambda _: None)
    caplog.clear()
    assert make_agent([], 1) is None
    assert not caplog.text
