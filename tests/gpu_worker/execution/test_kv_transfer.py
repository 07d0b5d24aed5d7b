"""KV that one worker computes and another fetches: equal answers, and nothing wrong, late or foreign is used."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.tiers import Wanted
from gpu_worker.execution.tiers import block_server, peer_tier, peer_wire, shared_memory
from gpu_worker.execution.tiers.block_load import BlockLoad
from gpu_worker.execution.tiers.block_server import BlockServer, split_address
from gpu_worker.execution.tiers.file_format import HEADER_BYTES, Maker
from gpu_worker.execution.tiers.leases import Lease
from gpu_worker.execution.tiers.nixl_transport import NixlAgent, NixlSender
from gpu_worker.execution.tiers.peer_tier import HANG_S, PeerTier
from gpu_worker.execution.tiers.peer_wire import (
    _PLACE,
    ITEM,
    MAX_REQUEST_BYTES,
    Kind,
    Opening,
    Receiver,
    receive_frame,
    send_file,
    send_frame,
)
from gpu_worker.execution.tiers.transfer import Transfer
from shared.errors import ConfigError
from shared.messages import encode
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.execution.tiered_engine import OF_ALL_KINDS, Answer, Models, PatientTiers, Served, sequence
from tests.waiting import wait_for

WEIGHTS = b"w" * 32
SALT = b"tenant"
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = Sampling(temperature=1.0, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPT = random_prompt(61, seed=3)


@dataclass
class Pair:
    """Two workers' engines."""

    prefill: Served
    decode: Served

    @property
    def giving(self) -> Transfer:
        return transfer_of(self.prefill)

    @property
    def fetching(self) -> Transfer:
        return transfer_of(self.decode)

    def begin(self, sampling: Sampling = GREEDY) -> tuple[Answer, Sequence]:
        """Compute the prompt and what comes with it; return that, and the sequence when it has been handed over."""
        begun = sequence("begun", PROMPT, SALT, sampling)
        gone: list[Sequence] = []
        answer: Answer = ([], [])
        self.prefill.engine.add(begun)
        while not gone:
            for event in self.prefill.engine.step() if self.prefill.engine.has_work() else ():
                answer[0].extend(event.token_ids)
                answer[1].extend(event.logprobs)
                if len(answer[0]) == len(event.token_ids):
                    self.prefill.engine.hand_over("begun", gone.append)
        self.prefill.scheduler.check_integrity()
        return answer, gone[0]

    def grant(self, gone: Sequence) -> Lease:
        lease = self.giving.leases.grant("r", 1, gone.salt, gone.block_digests)
        assert lease is not None
        return lease

    def open(self, lease: Lease) -> bool:
        return self.fetching.peers.open("w", self.giving.server.address, lease.token, "r", 1, len(PROMPT))

    def connect(self) -> socket.socket:
        return socket.create_connection(split_address(self.giving.server.address), timeout=10)

    def go_on(self, begun: Answer, sampling: Sampling = GREEDY) -> tuple[Answer, int]:
        """Go on where the other worker has stopped; return the whole answer, and of how many tokens there was KV."""
        resumed = sequence("resumed", [*PROMPT, *begun[0]], SALT, sampling)
        resumed.num_prompt_tokens = len(PROMPT)
        ((tokens, logprobs),) = self.decode.serve(resumed)
        return ([*begun[0], *tokens], [*begun[1], *logprobs]), resumed.num_cached_tokens


def transfer_of(served: Served) -> Transfer:
    assert served.transfer is not None
    wait_for(lambda: served.transfer is not None and served.transfer.maker)
    return served.transfer


@pytest.fixture
def make_pair(models: Models) -> Callable[..., Pair]:
    def make(
        name: str = "llama",
        weights: bytes = WEIGHTS,
        host_bytes: int = 1 << 22,
        nixl: tuple[bool, bool] = (False, False),
        **settings: object,
    ) -> Pair:
        pairs = zip((WEIGHTS, weights), nixl, strict=True)
        return Pair(*(Served(models.open(name, **settings), host_bytes, weights=w, has_nixl=n) for w, n in pairs))

    return make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture
def expected(models: Models) -> Answer:
    return alone(models)


def alone(models: Models, name: str = "llama", sampling: Sampling = GREEDY, **settings: object) -> Answer:
    """Return what one worker without any tier answers."""
    return Served(models.open(name, **settings), host_bytes=None).serve(sequence("alone", PROMPT, SALT, sampling))[0]


WAYS = {
    "stream": "fetched over TCP",
    "shared": "read in its memory, on this host",
    "nixl": "read in its memory, by NIXL",
}


@pytest.mark.parametrize(
    ("sampling", "way"), [(GREEDY, "stream"), (SEEDED, "shared"), (SEEDED, "nixl")], ids=["stream", "shared", "nixl"]
)
@OF_ALL_KINDS
def test_what_another_worker_goes_on_with_is_what_one_would_have_answered(
    name: str,
    settings: dict[str, object],
    sampling: Sampling,
    way: str,
    models: Models,
    make_pair: Callable[..., Pair],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(peer_wire, "FRAME_S", 60.0)
    if way == "nixl":
        pytest.importorskip("nixl", reason="NIXL does not support this platform")
    if way != "shared":
        monkeypatch.setattr(shared_memory, "connect", lambda *_: None)
    pair = make_pair(name, nixl=(way == "nixl",) * 2, **settings)
    begun, gone = pair.begin(sampling)
    lease = pair.grant(gone)
    assert pair.open(lease)
    (session,) = pair.fetching.peers._sessions.values()
    assert session._receiver.way == WAYS[way]
    assert f"KV of {pair.giving.server.address} is {WAYS[way]}" in caplog.messages
    assert pair.go_on(begun, sampling) == (alone(models, name, sampling, **settings), 60)
    assert pair.decode.hit_tokens("peer") == 60
    pair.fetching.peers.close("r", 1, is_done=True)
    wait_for(lambda: not len(pair.giving.leases))
    assert pair.giving.leases.num_read == 1
    assert_rows_are_free(pair)


def assert_rows_are_free(pair: Pair) -> None:
    """Assert that no row is held any more, and nothing counts as leased."""
    host = pair.giving.leases.host
    wait_for(lambda: not any(entry.num_pins for entries in host._entries for entry in entries.values()))
    assert pair.giving.leases.num_bytes == 0


@pytest.mark.parametrize("what", ["token", "request", "epoch", "twice", "over"])
def test_a_lease_is_opened_once_in_time_by_the_attempt_that_it_is_for(pair: Pair, expected: Answer, what: str) -> None:
    begun, gone = pair.begin()
    lease = pair.grant(gone)
    peers, address = pair.fetching.peers, pair.giving.server.address
    if what == "twice":
        assert pair.open(lease)
        assert not peers.open("w", address, lease.token, "r", 1, 61)
        assert len(peers) == 1, "the first reader keeps it"
        return
    if what == "over":
        pair.giving.leases.sweep(lease.ends_at + 1)
    token = "0" * 32 if what == "token" else lease.token
    assert not peers.open("w", address, token, "q" if what == "request" else "r", 2 if what == "epoch" else 1, 61)
    assert pair.go_on(begun) == (expected, 0)


@pytest.mark.parametrize("what", ["weights", "salt"])
def test_kv_of_other_weights_or_another_tenant_is_not_used(
    what: str, make_pair: Callable[..., Pair], expected: Answer
) -> None:
    pair = make_pair(weights=b"v" * 32) if what == "weights" else make_pair()
    begun, gone = pair.begin()
    gone.salt = SALT if what == "weights" else b"another"
    assert pair.open(pair.grant(gone))
    assert pair.go_on(begun) == (expected, 0)
    assert pair.fetching.peers.num_refused > 0
    assert pair.decode.hit_tokens("peer") == 0


def test_fetching_that_has_measured_slower_than_computing_is_not_begun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    tiers = pair.decode.tiers
    assert tiers is not None
    monkeypatch.setattr(PatientTiers, "prefill_rate", 1000.0)
    names = [(0, digest) for digest in gone.block_digests]
    # 60 tokens in 60 ms, or their bytes at one of these rates.
    for bytes_per_s, expected in ((1e9, True), (1e3, False)):
        tiers._meters["peer"] = rate = type(tiers._meters["peer"])()
        rate.observe(int(bytes_per_s), 1.0, 0)
        assert tiers.pays(names, 60) is expected


@pytest.mark.parametrize("how", ["time", "cancel", "reader", "forget"])
def test_rows_are_free_again_however_a_lease_ends(pair: Pair, how: str) -> None:
    _, gone = pair.begin()
    lease = pair.grant(gone)
    assert pair.giving.leases.num_bytes == pair.giving.leases.host.num_bytes_of(lease.rows) > 0
    if how == "time":
        pair.giving.leases.sweep(lease.ends_at + 0.001)
    elif how == "cancel":
        pair.giving.leases.cancel("r", 0)
        assert len(pair.giving.leases) == 1, "the attempt before was cancelled, which is over"
        pair.giving.leases.cancel("r", 1)
    elif how == "reader":
        assert pair.open(lease)
        pair.fetching.peers.close("r", 1)
        wait_for(lambda: not len(pair.giving.leases))
    else:
        pair.giving.leases.host.forget(gone.block_digests)
        pair.giving.leases.end(lease)
    assert_rows_are_free(pair)


def test_a_lease_that_ends_while_it_is_read_ends_the_connection(pair: Pair, expected: Answer) -> None:
    begun, gone = pair.begin()
    lease = pair.grant(gone)
    assert pair.open(lease)
    pair.giving.leases.cancel("r", None)
    assert pair.go_on(begun) == (expected, 0)
    assert_rows_are_free(pair)


def test_leased_rows_are_not_reused_and_leases_are_bounded(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(host_bytes=1 << 15)
    _, gone = pair.begin()
    leases = pair.giving.leases
    lease = pair.grant(gone)
    size = leases.num_bytes
    assert 2 * size > leases.max_bytes
    assert leases.grant("other choice", 1, SALT, gone.block_digests) is not None, "of the same rows"
    assert leases.num_bytes == size
    assert not leases.has_room(size), "more than half would be leased"
    pair.prefill.fill()
    assert leases.host.num_evicted > 0, "the host's memory is full"
    assert all(leases.host.has(*name) for name in lease.rows)


Act = Callable[[socket.socket], None]


@contextlib.contextmanager
def lying(act: Act, *, is_near: bool = False) -> Iterator[str]:
    """Listen as a worker, on this host if it `is_near`, that does not what a worker should; yield its address."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if is_near:
            local = shared_memory.listen(address, 8)
            assert local is not None
            server = stack.enter_context(local)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                act(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield address
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


POINTS = ("accepted", "opened", "listed", "asked", "amid-a-block", "one-block")


@pytest.mark.parametrize("ending", ["dies", "hangs"])
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_or_hangs_at_any_point_costs_a_second(
    pair: Pair, expected: Answer, point: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_wire, "FRAME_S", 0.2)
    begun, gone = pair.begin()
    names = b"".join(ITEM.pack(0, digest) for digest in gone.block_digests)
    host, maker = pair.giving.leases.host, pair.giving.peers.maker
    assert maker is not None
    is_over = threading.Event()

    def block(connection: socket.socket) -> bytes:
        _, body = receive_frame(connection, MAX_REQUEST_BYTES, 5)
        group, digest = ITEM.unpack(body[: ITEM.size])
        with host.pinned(group, digest) as row:
            assert row is not None
            return maker.header(group, digest, SALT, row.data) + row.tobytes()

    def act(connection: socket.socket) -> None:
        place = POINTS.index(point)
        if place >= POINTS.index("opened"):
            receive_frame(connection, 512, 5)
        if place >= POINTS.index("listed"):
            send_frame(connection, Kind.CONTENTS, names)
        if point == "asked":
            receive_frame(connection, MAX_REQUEST_BYTES, 5)
        elif point == "amid-a-block":
            content = block(connection)
            connection.sendall(peer_wire._HEAD.pack(1 + len(content), Kind.BLOCK) + content[:-5])
        elif point == "one-block":
            send_frame(connection, Kind.BLOCK, block(connection))
        if ending == "hangs":
            is_over.wait(20)

    with lying(act) as address:
        started = time.monotonic()
        pair.fetching.peers.open("w", address, "0" * 32, "r", 1, 61)
        answer, num_cached = pair.go_on(begun)
        is_over.set()
        pair.fetching.peers.close("r", 1)
    assert answer == expected
    assert num_cached <= (60 if point == "one-block" else 0)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("point", ["before", "opened", "asked", "amid", "one"])
def test_a_reader_that_dies_at_any_point_frees_the_lease(pair: Pair, point: str) -> None:
    _, gone = pair.begin()
    lease = pair.grant(gone)
    with pair.connect() as reader:
        opening = encode(Opening(1, lease.token, "r", 1))
        if point == "amid":
            reader.sendall(peer_wire._HEAD.pack(1 + len(opening), Kind.OPEN) + opening[:-1])
        elif point != "before":
            send_frame(reader, Kind.OPEN, opening)
            assert receive_frame(reader, 1 << 20, 5)[0] is Kind.CONTENTS
        if point in ("asked", "one"):
            send_frame(reader, Kind.GET, ITEM.pack(0, gone.block_digests[0]))
        if point == "one":
            assert receive_frame(reader, 1 << 20, 5)[0] is Kind.BLOCK
    if point in ("before", "amid"):
        # It was not opened: whoever it is for may still come.
        assert pair.open(lease)
        return
    wait_for(lambda: not len(pair.giving.leases), 5)
    assert_rows_are_free(pair)


NOT_READ = "KV is not read to the end"


@pytest.mark.parametrize("who", ["reader", "reader-amid", "cancel", "server", "over", "garbage"])
def test_ended_lease_is_logged_only_where_the_reader_failed(
    pair: Pair, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, gone = pair.begin()
    lease = pair.grant(gone)
    with pair.connect() as reader:
        send_frame(reader, Kind.OPEN, encode(Opening(1, lease.token, "r", 1)))
        assert receive_frame(reader, 1 << 20, 5)[0] is Kind.CONTENTS
        if who == "reader-amid":
            reader.sendall(peer_wire._HEAD.pack(1 + ITEM.size, Kind.GET))
        if who.startswith("reader"):
            reader.close()
        elif who == "cancel":
            pair.giving.leases.cancel("r", 1)
        elif who == "server":
            pair.giving.leases.close()
        elif who == "over":
            lease.ends_at = time.monotonic()
            pair.giving.leases.sweep(time.monotonic())
        else:
            send_frame(reader, Kind.PLACES)
        assert_rows_are_free(pair)
    wait_for(lambda: pair.giving.server._places._value == block_server.MAX_CONNECTIONS)
    assert (NOT_READ in caplog.text) is (who in ("over", "garbage"))


def test_closed_session_ends_reads_without_a_failure(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    _, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    peers = pair.fetching.peers
    (session,) = peers._sessions.values()
    assert pair.decode.tiers is not None
    with session._lock:
        # Threads that load wait for the lock while the request is cancelled.
        load = pair.decode.tiers.load(SALT, [Wanted(0, digest, 0) for digest in gone.block_digests])
        closing = threading.Thread(target=peers.close, args=("r", 1))
        closing.start()
        wait_for(lambda: session.is_closed)
    closing.join(10)
    wait_for(lambda: load.num_ended == len(gone.block_digests))
    assert load.end() == [False] * len(gone.block_digests)
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert (peers.num_failed, warned) == (0, [])


class OpeningBefore(msgspec.Struct, frozen=True, array_like=True):
    """What the version before reads of an opening."""

    version: int
    lease: str
    request: str
    epoch: int
    asks_many: bool = False


def test_opening_is_one_that_the_version_before_answers_with_many_contents(pair: Pair) -> None:
    _, gone = pair.begin()
    opening = encode(Opening(1, pair.grant(gone).token, "r", 1, has_nixl=True))
    assert msgspec.msgpack.decode(opening, type=OpeningBefore).asks_many
    assert int(Kind.CONTENTS) == 10


def test_what_is_opened_while_the_worker_ends_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gone = pair.begin()
    opened: list[peer_tier.PeerSession] = []
    open_session = peer_tier._open

    def end_amid(*arguments: Any) -> peer_tier.PeerSession:
        opened.append(open_session(*arguments))
        pair.fetching.close()
        return opened[0]

    monkeypatch.setattr(peer_tier, "_open", end_amid)
    assert not pair.open(pair.grant(gone))
    assert opened[0].is_closed
    with pair.connect() as stranger:
        wait_for(lambda: pair.giving.server._strangers)
        pair.giving.close()
        assert stranger.recv(64) == b""


def test_only_what_the_lease_names_is_sent(pair: Pair) -> None:
    _, gone = pair.begin()
    other = sequence("other", random_prompt(61, seed=4), b"other tenant")
    pair.prefill.serve(other)
    assert pair.giving.leases.host.has(0, other.block_digests[0])
    lease = pair.grant(gone)
    with pair.connect() as reader:
        send_frame(reader, Kind.OPEN, encode(Opening(1, lease.token, "r", 1)))
        _, names = receive_frame(reader, 1 << 20, 5)
        assert other.block_digests[0] not in {digest for _, digest in ITEM.iter_unpack(names)}
        send_frame(reader, Kind.GET, ITEM.pack(0, other.block_digests[0]))
        with pytest.raises(OSError, match="closed"):
            receive_frame(reader, 1 << 20, 5)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x01\x00\x00\x00\x01", b"\x00" * 9])
def test_strangers_are_not_waited_for_and_keep_nobody_out(
    pair: Pair, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "OPEN_S", 0.3)
    _, gone = pair.begin()
    lease = pair.grant(gone)
    strangers = [pair.connect() for _ in range(block_server.MAX_CONNECTIONS)]
    try:
        for each in strangers:
            each.sendall(sent)
        for each in strangers:
            with contextlib.suppress(ConnectionResetError):
                while each.recv(64):
                    pass
        assert pair.open(lease)
    finally:
        for each in strangers:
            each.close()


def test_strangers_give_their_places_to_workers_and_readers_keep_theirs(
    make_pair: Callable[..., Pair], expected: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(block_server, "OPEN_S", 60.0)
    pair = make_pair()
    begun, gone = pair.begin()
    with contextlib.ExitStack() as stack:
        # A worker of this host that has not sent its lease yet.
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.connect(shared_memory._name(pair.giving.server.address))
        wait_for(lambda: pair.giving.server._strangers)
        strangers = [stack.enter_context(pair.connect()) for _ in range(7)]
        assert [each.recv(64) for each in strangers[:4]] == [b""] * 4
        with pytest.raises(BlockingIOError):
            local.recv(1, socket.MSG_DONTWAIT)
        local.close()
        strangers = strangers[4:]
        wait_for(lambda: len(pair.giving.server._strangers) == 3)
        assert pair.open(pair.grant(gone))
        strangers += [stack.enter_context(pair.connect()) for _ in range(6)]
        # The oldest were cut off.
        assert [each.recv(64) for each in strangers[:6]] == [b""] * 6
        assert pair.go_on(begun) == (expected, 60)


MAKER = Maker(WEIGHTS, (b"a" * 32, b"b" * 32))
ROW_BYTES = 300


def wrong_block(rng: random.Random, digest: bytes, content: bytes) -> bytes:
    """Return what a worker might send instead of a content."""
    makers = (replace(MAKER, weights=b"x" * 32), replace(MAKER, layouts=(b"c" * 32, b"b" * 32)))
    whole = MAKER.header(0, digest, SALT, memoryview(content)) + content
    kind = rng.randrange(6)
    if kind == 0:
        flipped = bytearray(whole)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 1:
        return whole[: rng.randrange(len(whole))]
    if kind == 2:
        return MAKER.header(0, digest, b"another", memoryview(content)) + content
    if kind == 3:
        return MAKER.header(0, bytes(32), SALT, memoryview(content)) + content
    if kind == 4:
        return MAKER.header(1, digest, SALT, memoryview(content)) + content
    return makers[rng.randrange(2)].header(0, digest, SALT, memoryview(content)) + content


def peers_of(*row_bytes: int, nixl: NixlAgent | None = None) -> PeerTier:
    """Make a tier of groups whose contents have so many bytes."""
    peers = PeerTier(list(row_bytes), 4, nixl)
    peers.maker = MAKER
    return peers


def count_loaded(count: int, way: str) -> tuple[int, int]:
    """Ask for contents of which only wrong ones come; return how many were taken, and how many refused or failed."""
    rng = random.Random(5)
    digest = rng.randbytes(32)
    shared = shared_memory.make_shared(4 * ROW_BYTES)
    assert shared is not None
    file, memory = shared
    base = memory.ctypes.data if way == "nixl" else 0
    agents = [NixlAgent([(base, memory.nbytes)], ROW_BYTES) for _ in range(2 if way == "nixl" else 0)]

    def act(connection: socket.socket) -> None:
        receive_frame(connection, 512, 5)
        if way == "shared":
            send_file(connection, Kind.SHARED, file)
        elif way == "nixl":
            send_frame(connection, Kind.NIXL, agents[0].description)
        send_frame(connection, Kind.CONTENTS, ITEM.pack(0, digest))
        receive_frame(connection, 64, 5)
        whole = wrong_block(rng, digest, rng.randbytes(ROW_BYTES))
        if way == "stream":
            send_frame(connection, Kind.BLOCK, whole)
        else:
            # What is cut off lies behind the end of the memory.
            place = 3 * ROW_BYTES + (HEADER_BYTES + ROW_BYTES - len(whole))
            content = np.frombuffer(whole[HEADER_BYTES:], np.uint8)
            memory[place : place + len(content)] = content
            send_frame(connection, Kind.PLACES, _PLACE.pack(base + place, whole[:HEADER_BYTES]))
        with contextlib.suppress(OSError):
            if agents:
                NixlSender(connection, agents[0]).wait(60)
            receive_frame(connection, 64, 5)

    peers, num_loaded = peers_of(ROW_BYTES, ROW_BYTES, nixl=agents[1] if agents else None), 0
    with lying(act, is_near=way == "shared") as address:
        for number in range(count):
            assert peers.open("w", address, "0" * 32, str(number), 1, 4)
            num_loaded += peers.read(0, digest, SALT) is not None
            peers.close(str(number), 1)
    os.close(file)
    for agent in agents:
        agent.close()
    return num_loaded, peers.num_refused + peers.num_failed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_wrong_is_loaded(count: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "nixl":
        pytest.importorskip("nixl", reason="NIXL does not support this platform")
    # After a content that NIXL does not find the others would come over TCP.
    monkeypatch.setattr(peer_tier, "WITHOUT_NIXL_S", 0.0)
    monkeypatch.setattr(peer_wire, "FRAME_S", 60.0)
    assert count_loaded(count, way) == (0, count)


def test_memory_is_shared_to_be_read_and_only_with_processes_of_the_same_user(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gone = pair.begin()
    address = pair.giving.server.address
    file = pair.giving.leases.host.file
    assert file is not None
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert shared_memory.connect(address, 1.0) is None
    monkeypatch.setattr(shared_memory, "connect", connect_blindly)
    assert not pair.open(pair.grant(gone)), "it is not served"


def test_process_of_another_user_takes_no_place(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(block_server, "OPEN_S", 60.0)
    pair = make_pair()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(pair.connect()) for _ in range(2)]
        wait_for(lambda: len(pair.giving.server._strangers) == 2)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        for _ in range(8):
            local = stack.enter_context(connect_blindly(pair.giving.server.address, 1.0))
            local.settimeout(10)
            assert local.recv(1) == b""
        for each in workers:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def connect_blindly(address: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(shared_memory._name(address))
    return connection


def test_of_a_killed_worker_no_memory_and_no_name_is_left() -> None:
    code = """
        import sys, time
        from gpu_worker.execution.tiers import shared_memory
        made = shared_memory.make_shared(1 << 20), shared_memory.listen("host:1", 8)
        print(all(made), flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        connection = shared_memory.connect("host:1", 1.0)
        assert connection is not None
        connection.close()
        process.kill()
    assert shared_memory.connect("host:1", 1.0) is None


def test_a_prefix_is_asked_for_at_once(pair: Pair, expected: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip for each block would wait for the interpreters of both workers, which compute."""
    begun, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    sent: list[Kind] = []
    send = peer_tier.send_frame

    def count(connection: socket.socket, kind: Kind, *parts: bytes) -> None:
        sent.append(kind)
        send(connection, kind, *parts)

    monkeypatch.setattr(peer_tier, "send_frame", count)
    assert pair.go_on(begun) == (expected, 60)
    assert sent == [Kind.GET]


@contextlib.contextmanager
def session_with(names: list[tuple[int, bytes]], asked: list[int]) -> Iterator[peer_tier.PeerSession]:
    """Yield a session with a sender that notes how many contents each question names, and sends each its digest."""
    reader, sender = socket.socketpair()

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                _, body = receive_frame(sender, MAX_REQUEST_BYTES, 60)
                asked.append(len(body) // ITEM.size)
                for _, digest in ITEM.iter_unpack(body):
                    send_frame(sender, Kind.BLOCK, digest)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    session = peer_tier.PeerSession(reader, Receiver(reader, [32]), frozenset(names), "w", "a:1")
    try:
        yield session
    finally:
        session.close()
        thread.join(10)
        sender.close()


def numbered(count: int) -> list[tuple[int, bytes]]:
    return [(0, bytes([number]) * 32) for number in range(count)]


def test_contents_that_two_loads_want_are_asked_for_once() -> None:
    names, asked = numbered(40), list[int]()
    with session_with(names, asked) as session:
        session.expect(names)
        session.expect(names)
        assert b"".join(session.get(name) or b"" for name in names) == b"".join(digest for _, digest in names)
        assert asked == [40]


def test_what_a_load_has_asked_for_and_not_read_is_taken_off_the_wire_and_let_go() -> None:
    names, asked = numbered(100), list[int]()
    peers = PeerTier([32], 4)
    with session_with(names, asked) as session:
        peers._sessions["r", 1] = session
        peers.expect(names)
        assert session.get(names[0]) is not None
        peers.forget(names)
        assert (list(session._asked), session._received) == ([], {})
        # What was expected is not asked for with what another load wants.
        assert bytes(session.get(names[99]) or b"") == names[99][1]
        assert asked == [64, 1]


def test_of_a_load_that_ends_early_nothing_is_left(pair: Pair) -> None:
    _, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    (session,) = pair.fetching.peers._sessions.values()
    assert pair.decode.tiers is not None
    with session._lock:
        load = pair.decode.tiers.load(SALT, [Wanted(0, digest, 0) for digest in gone.block_digests])
        wait_for(lambda: session._expected)
        load.end()
    wait_for(lambda: not (session._expected or session._asked or session._received))
    assert not session.is_closed


@pytest.mark.parametrize("how", ["read", "forgotten", "suspended"])
def test_a_worker_that_sends_each_content_just_in_time_holds_loads_up_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_wire, "FRAME_S", 0.4)
    monkeypatch.setattr(peer_wire, "MOST_FRAME_S", 0.8)
    names, is_over = numbered(40), threading.Event()

    def act(connection: socket.socket) -> None:
        receive_frame(connection, 512, 5)
        send_frame(connection, Kind.CONTENTS, b"".join(ITEM.pack(*name) for name in names))
        _, body = receive_frame(connection, MAX_REQUEST_BYTES, 60)
        for _, digest in ITEM.iter_unpack(body):
            is_over.wait(0.25)
            send_frame(connection, Kind.BLOCK, MAKER.header(0, digest, SALT, memoryview(digest)) + digest)

    peers = peers_of(32)
    with lying(act) as address:
        assert peers.open("w", address, "0" * 32, "r", 1, 161)
        peers.expect(names)
        assert peers.read(*names[0], SALT) is not None
        started = time.monotonic()
        if how == "read":
            assert peers.read(*names[39], SALT) is None
        elif how == "forgotten":
            peers.forget(names)
        else:
            monkeypatch.setattr(peer_wire, "MOST_FRAME_S", 60.0)
            reading = threading.Thread(target=peers.read, args=(*names[39], SALT))
            reading.start()
            wait_for(lambda: any(time.monotonic() - since > HANG_S for _, since in peers._reading.values()))
            assert peers.suspend()
            reading.join(10)
        assert time.monotonic() - started < 5, "all 40 take ten seconds"
        assert not peers.has(*names[39])
        assert not peers.open("w", address, "0" * 32, "r", 1, 161), "it is left alone for a while"
        is_over.set()


def test_worker_that_sends_nothing_keeps_no_other_load_waiting(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_wire, "FRAME_S", 60.0)
    (_, gone), tiers, peers = pair.begin(), pair.decode.tiers, pair.fetching.peers
    assert tiers is not None
    names, is_over, numbers = numbered(12), threading.Event(), itertools.count()

    def act(connection: socket.socket) -> None:
        receive_frame(connection, 512, 5)
        send_frame(connection, Kind.CONTENTS, ITEM.pack(*names[next(numbers)]))
        is_over.wait(60)

    def load(*digests: bytes) -> BlockLoad:
        return tiers.load(SALT, [Wanted(0, digest, 0) for digest in digests])

    with lying(act) as address, lying(act) as elsewhere:
        for number in range(len(names)):
            assert peers.open(f"liar {number}", address, "0" * 32, f"lie {number}", 1, 61)
        hanging = [load(digest) for _, digest in names]
        wait_for(lambda: len(peers._reading) == len(names))
        assert pair.open(pair.grant(gone))
        fetched = load(*gone.block_digests)
        wait_for(lambda: fetched.num_ended == len(gone.block_digests))
        assert all(fetched.end())
        tiers.store(0, 0, b"own" * 8, SALT)
        tiers.flush()
        wait_for(lambda: tiers._host.has(0, b"own" * 8))
        own = load(b"own" * 8)
        wait_for(lambda: own.num_ended == 1)
        assert own.end() == [True]
        wait_for(lambda: all(time.monotonic() - since > HANG_S for _, since in list(peers._reading.values())))
        tiers.suspend()
        wait_for(lambda: all(each.num_ended == 1 for each in hanging))
        assert not any(peers.has(*name) for name in names)
        assert peers.has(0, gone.block_digests[0]), "it does not hang"
        assert not peers.open("liar 0", elsewhere, "0" * 32, "lie", 1, 61), "it is not trusted elsewhere either"
        is_over.set()
        for number in range(len(names)):
            peers.close(f"lie {number}", 1)


def test_right_contents_are_loaded_from_the_same_server() -> None:
    names = numbered(3)

    def act(connection: socket.socket) -> None:
        receive_frame(connection, 512, 5)
        send_frame(connection, Kind.CONTENTS, b"".join(ITEM.pack(*name) for name in names))
        _, body = receive_frame(connection, MAX_REQUEST_BYTES, 60)
        for _, digest in ITEM.iter_unpack(body):
            send_frame(connection, Kind.BLOCK, MAKER.header(0, digest, SALT, memoryview(digest)) + digest)

    peers = peers_of(32)
    with lying(act) as address:
        assert peers.open("w", address, "0" * 32, "r", 1, 61)
        peers.expect(names)
        read = [peers.read(*name, SALT) for name in names]
        peers.close("r", 1)
    assert [None if each is None else each.tobytes() for each in read] == [digest for _, digest in names]


@pytest.mark.parametrize(("num_contents", "is_open"), [(32, True), (33, False), (1 << 20, False)])
def test_no_longer_list_of_contents_is_read_than_the_request_can_need(
    num_contents: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_wire, "FRAME_S", 30.0)
    hangs_up = threading.Event()

    def act(connection: socket.socket) -> None:
        receive_frame(connection, 512, 5)
        num_bytes = num_contents * ITEM.size
        connection.sendall(peer_wire._HEAD.pack(1 + num_bytes, Kind.CONTENTS) + bytes(min(num_bytes, 4096)))
        with contextlib.suppress(OSError):
            receive_frame(connection, 64, 60)
        hangs_up.set()

    peers = peers_of(ROW_BYTES, ROW_BYTES)
    with lying(act) as address:
        started = time.monotonic()
        # Two groups of 16 blocks.
        assert peers.open("w", address, "0" * 32, "r", 1, 61) is is_open
        assert is_open or time.monotonic() - started < 20, "it waits for the rest"
        peers.close("r", 1)
        assert hangs_up.wait(10)


def test_a_worker_that_did_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = peers_of(ROW_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert not peers.open("w", address, "0" * 32, "r", 1, 61)

    def fail(*arguments: object, **settings: object) -> None:
        pytest.fail("it is asked again")

    monkeypatch.setattr(peer_tier, "_open", fail)
    assert not peers.open("w", address, "0" * 32, "r", 1, 61)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "h:70000", "h:\u00b2", f"{'a' * 64}:1", "a..b:1", "\ufffd:1"])
def test_of_a_worker_that_tells_an_address_that_is_none_nothing_is_fetched(address: str) -> None:
    peers = peers_of(ROW_BYTES)
    assert not peers.open("w", address, "0" * 32, "r", 1, 61)
    assert peers.num_failed == 1


def test_no_name_that_a_worker_tells_is_looked_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, *rest: object, **options: object) -> Any:
        assert host == "127.0.0.1", "to look up a name may take long"
        return real(host, *rest, **options)

    server = BlockServer("localhost", pair.giving.leases, lambda: None)
    server.close()
    assert server.address.startswith("127.0.0.1:"), "where others find it without looking up a name"
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(shared_memory, "connect", lambda *_: None)
    _, gone = pair.begin()
    assert pair.open(pair.grant(gone))
    peers = peers_of(ROW_BYTES)
    for address in ("localhost:9", "kv.example:7000", "[kv]:9"):
        assert not peers.open("w", address, "0" * 32, "r", 1, 61)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "", ":7000", "a:b", "h:70000", "*"])
def test_an_address_at_which_nobody_is_found_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_KV_ADDRESS"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("10.0.0.1:7000") == ("10.0.0.1", 7000)
    assert split_address("[fd00::1]:7000") == ("fd00::1", 7000)
    assert split_address("host") == ("host", 0)


def test_a_port_that_is_taken_is_said_to_be(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_KV_ADDRESS"):
        BlockServer(pair.giving.server.address, pair.giving.leases, lambda: None)
