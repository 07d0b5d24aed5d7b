"""Fixtures for everyone: real servers, for a module or the session to share, or fresh ones that the test may kill."""

from __future__ import annotations

import gc
import logging
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from tests.servers import NatsServer, RedisServer, Server

Started = TypeVar("Started", bound=Server)

# Set here and not in a hook: torch and Triton read these when they are first imported, and the conftest files of the
# folders below, which come right after this one, import them.
# Where there is no GPU, Triton kernels run in its interpreter.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests share their cores with other tests: threads that wait for each other must not hold one meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# An example takes as long as the other tests let it: by default hypothesis fails one that takes 200 ms now and then.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def pytest_sessionstart() -> None:
    """Let the processes that tests start be interrupted: they inherit that SIGINT is ignored from a shell's `... &`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let CI run another share of the slow tests with each commit."""
    parser.addoption("--share", metavar="K/N", help="Run the tests of one of N shares; K counts on beyond N.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the wanted share. A test's name decides its share, so that new tests move no others."""
    if wanted := config.getoption("--share"):
        number, num_shares = map(int, wanted.split("/"))
        chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % num_shares == number % num_shares]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what collecting imports: modules that stay, millions of objects with torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        _let_loggers_propagate()


def _let_loggers_propagate() -> None:
    """Let what torch logs come to the root's handlers.

    To each logger that does not propagate pytest adds its handlers, and takes them away again, in each phase of each
    test: torch has forty such, which took as long as a small test does.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A NATS server with JetStream that a module's tests share: use names of your own, and do not kill it.

    Each test leaves consumers behind, and each takes longer with more of them; a server starts in no time.
    """
    with NatsServer(tmp_path_factory.mktemp("nats")).running() as server:
        yield server


@pytest.fixture(scope="module")
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server that tests share: use keys of your own, and do not kill it."""
    with RedisServer(tmp_path_factory.mktemp("redis")).running() as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def started_servers() -> Iterator[list[Server]]:
    """Servers that this test started; killed when it ends."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def start_nats(tmp_path: Path, started_servers: list[Server]) -> Callable[..., NatsServer]:
    """Start a fresh NATS server of this test's own: `start_nats()`, `start_nats("-c", config_file)`."""
    return partial(_start, NatsServer, tmp_path, started_servers)


@pytest.fixture
def start_redis(tmp_path: Path, started_servers: list[Server]) -> Callable[..., RedisServer]:
    """Start a fresh Redis server of this test's own: `start_redis()`, `start_redis("--maxmemory", "1mb")`."""
    return partial(_start, RedisServer, tmp_path, started_servers)


def _start(kind: type[Started], directory: Path, started: list[Server], *arguments: str) -> Started:
    server = kind(directory / f"{kind.__name__}-{len(started)}", arguments)
    started.append(server)
    server.start()
    return server
