"""The hops of a request without this system: the least that the same kernel, NATS, Redis and Python take for them.

Two forked processes with blocking sockets stand for gateway and worker: a request of 300 bytes comes in, Redis is asked
for a key that it does not have, the request goes through a JetStream work queue to a worker that pulls it, from its
main thread to another one and back, and as a plain message to the gateway, which answers. Nothing is parsed, checked or
encoded. Each of `CHAINS` has one part more than the one before.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from ops.bench.load.processes import HOST

CHAINS = ("client and gateway", "with Redis", "with NATS and a worker", "with JetStream", "with the worker's thread")
_REQUEST, _ANSWER = b"r" * 300, b"x" * 300
_NEXT = b"$JS.API.CONSUMER.MSG.NEXT.BARE.worker"
_PULL = b'{"batch":1,"expires":5000000000}'


def round_trips(chain: str, nats_port: int, redis_port: int, count: int, pause_s: float) -> list[float]:
    """Return how long each of `count` requests took through one of `CHAINS`, in seconds."""
    depth = CHAINS.index(chain)
    with socket.create_server((HOST, 0)) as listener:
        worker = _forked(lambda: _work(nats_port, depth)) if depth >= 2 else contextlib.nullcontext()
        with worker, _forked(lambda: _serve(listener, nats_port, redis_port, depth)):
            time.sleep(0.3)  # both have subscribed
            with _connected(listener.getsockname()[1]) as client:
                return [_ask(client, pause_s) for _ in range(count)]


def make_queue(nats_port: int) -> None:
    """Make the work queue that the chains with JetStream use."""
    stream = {"name": "BARE", "subjects": ["bare.req"], "retention": "workqueue", "storage": "memory"}
    consumer = {"stream_name": "BARE", "config": {"durable_name": "worker", "ack_policy": "explicit"}}
    with _nats(nats_port) as nats:
        nats.sendall(b"SUB bare.made 1\r\n")
        for subject, body in (("STREAM.CREATE.BARE", stream), ("CONSUMER.CREATE.BARE.worker", consumer)):
            nats.sendall(_pub(f"$JS.API.{subject}".encode(), json.dumps(body).encode(), b"bare.made"))
            if b'"error"' in (answer := nats.recv(65536)):
                raise RuntimeError(f"JetStream refuses: {answer!r}")


def _ask(client: socket.socket, pause_s: float) -> float:
    time.sleep(pause_s)
    began = time.perf_counter()
    client.sendall(_REQUEST)
    client.recv(65536)
    return time.perf_counter() - began


def _serve(listener: socket.socket, nats_port: int, redis_port: int, depth: int) -> None:
    nats, redis = _nats(nats_port), _connected(redis_port)
    nats.sendall(b"SUB bare.tok 1\r\nSUB bare.ack 2\r\n")
    client, _ = listener.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while client.recv(65536):
        if depth >= 1:
            redis.sendall(b"GET nothing\r\n")
            redis.recv(4096)
        if depth >= 2:
            nats.sendall(_pub(b"bare.req" if depth >= 3 else b"bare.core", _REQUEST, b"bare.ack"))
            while b"bare.tok" not in nats.recv(65536):
                pass
        client.sendall(_ANSWER)


def _work(nats_port: int, depth: int) -> None:
    nats = _nats(nats_port)
    handed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    done, finish = socket.socketpair()

    def compute() -> None:
        while True:
            handed.get()
            finish.send(b"x")

    threading.Thread(target=compute, daemon=True).start()
    pull = _pub(_NEXT, _PULL, b"bare.inbox") if depth >= 3 else b""
    nats.sendall(b"SUB bare.inbox 1\r\nSUB bare.core 2\r\n" + pull)
    while received := nats.recv(65536):
        if b"$JS.ACK" not in received and b"bare.core" not in received:
            continue
        if depth >= 4:
            handed.put(received)
            done.recv(1)
        answer = _pub(b"bare.tok", b"y" * 100)
        if depth >= 3:
            # MSG <subject> <sid> <reply> <bytes>
            answer += _pub(received.split(b" ", 4)[3], b"+ACK") + pull
        nats.sendall(answer)


def _pub(subject: bytes, payload: bytes, reply: bytes = b"") -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _nats(port: int) -> socket.socket:
    connection = _connected(port)
    connection.recv(65536)
    connection.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nPING\r\n')
    if b"PONG" not in connection.recv(65536):
        raise RuntimeError("NATS does not answer")
    return connection


@contextlib.contextmanager
def _forked(run: Callable[[], None]) -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
