from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.dispatch_bench import PATIENT_FLEET, PATIENT_RECOVERY, Bench
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.shared_gateway import OPERATOR_KEY
from tests.gateway.wire_worker import WireWorker
from tests.servers import NatsServer


@pytest.fixture(scope="module")
def gateway(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with default settings for a module's tests; modules that need others have a fixture of this name."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), nats_url) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def shared_nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The NATS server of `shared_gateway`."""
    with NatsServer(tmp_path_factory.mktemp("nats")).running() as server:
        yield server.url


@pytest.fixture(scope="session")
def shared_gateway(
    shared_nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway with Redis and an operator's port, for all modules that import the fixtures of `shared_gateway.py`."""
    settings = {"redis_url": redis_url, "operator_port": 0, "operator_key": OPERATOR_KEY}
    with running_gateway(tmp_path_factory.mktemp("gateway"), shared_nats_url, **settings) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[RawClient]:
    """A connection to the gateway of the test's module."""
    async with connected(gateway) as client:
        yield client


@pytest.fixture
def no_collector() -> Iterator[None]:
    """For tests of what is freed at once."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def worker(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[WireWorker]:
    """A worker of a model of its own, known to the gateway of the test's module."""
    async with known_worker(nats_url, gateway) as worker:
        yield worker


@pytest.fixture
async def bench(nats_url: str) -> AsyncIterator[Bench]:
    """A dispatcher of a model of its own, at the session's NATS server. Nothing times out within a test."""
    async with AsyncExitStack() as stack:
        bench = Bench(nats_url, stack)
        bench.limits, bench.fleet_limits = PATIENT_RECOVERY, PATIENT_FLEET
        await bench.start()
        yield bench


@pytest.fixture
async def hasty_bench(nats_url: str) -> AsyncIterator[Bench]:
    """The same, of which everything times out within a second."""
    async with AsyncExitStack() as stack:
        bench = Bench(nats_url, stack)
        await bench.start()
        yield bench


@pytest.fixture
def nats(start_nats: Callable[..., NatsServer]) -> NatsServer:
    """A NATS server of the test's own, which may be stopped."""
    return start_nats()


@pytest.fixture
async def own_bench(nats: NatsServer) -> AsyncIterator[Bench]:
    """A dispatcher of a model of its own, at the test's own NATS server."""
    async with AsyncExitStack() as stack:
        bench = Bench(nats.url, stack)
        await bench.start()
        yield bench
