"""A worker as a process: what it says, how it ends.

Orders of gateways for adapters: each is answered, whatever is wrong with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import msgspec
import pytest
import torch
from nats.aio.msg import Msg

from gpu_worker.adapters.config import AdapterError
from gpu_worker.start import worker
from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import Adapting
from gpu_worker.start.worker import _ConnectionEvents, _identity, _served_model
from gpu_worker.start.worker_adapters import AdapterAccess, AdapterOrders, WorkerAdapters
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.adapter_calls import AdapterOrder, AdapterReply
from shared.adapter_store import AdapterStoreError
from shared.errors import ConfigError
from shared.features import ADAPTER_STORE
from shared.grammar import LlguidanceMissingError
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import ALL_WORKERS
from tests.gpu_worker.consumer.harness import DEMO_MODEL, TestGateway, fresh_name, wait_until
from tests.servers import NatsServer

SIMULATED_WITHOUT_TORCH = """
import sys
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
import gpu_worker.start.worker
directory = read_model_directory(__import__("pathlib").Path(sys.argv[1]))
build_engine(WorkerConfig(simulate=1.0), directory, ModelTokenizer(directory))
assert not {"torch", "triton"} & set(sys.modules)
"""


@contextlib.asynccontextmanager
async def _worker_process(*arguments: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    variables = {f"HEADRACE_{name.upper()}": value for name, value in settings.items()}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *(arguments or ("-m", "gpu_worker")), env=environ | variables, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _wait_until_serving(gateway: TestGateway, *, is_draining: bool = False) -> None:
    heard = asyncio.Event()

    async def hear(message: Msg) -> None:
        heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
        if (heartbeat.model, heartbeat.draining) == (gateway.model, is_draining):
            heard.set()

    await gateway.nats.subscribe(ALL_WORKERS, cb=hear)
    await asyncio.wait_for(heard.wait(), 60)


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[TestGateway]:
    nats = await connect(nats_url, role="gateway", name="test")
    gateway = TestGateway(nats, fresh_name("m"))
    await gateway.start()
    yield gateway
    await nats.close()


def _settings(nats_url: str, gateway: TestGateway, **more: str) -> dict[str, str]:
    base = {"model": str(DEMO_MODEL), "served_model_name": gateway.model, "nats_url": nats_url, "simulate": "5"}
    return base | more


async def test_sigterm_finishes_what_runs_and_exits_cleanly(
    nats_url: str, gateway: TestGateway, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    async with _worker_process(**_settings(nats_url, gateway, audit_file=str(audit))) as process:
        await _wait_until_serving(gateway)
        answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=60, ignore_eos=True)))
        await answer.wait_for_tokens(1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    assert answer.finish.reason == "length"
    await gateway.wait_until_acknowledged()
    (entry,) = map(json.loads, audit.read_text().splitlines())
    assert (entry["action"], entry["outcome"], entry["who"]["pid"]) == ("worker.drain", "done", process.pid)


async def test_second_signal_exits_at_once(nats_url: str, gateway: TestGateway) -> None:
    async with _worker_process(**_settings(nats_url, gateway, simulate="100")) as process:
        await _wait_until_serving(gateway)
        answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=1500, ignore_eos=True)))
        await answer.wait_for_tokens(1)
        process.send_signal(signal.SIGINT)
        await _wait_until_serving(gateway, is_draining=True)
        assert process.returncode is None
        process.send_signal(signal.SIGINT)
        # The answer would take two minutes more.
        assert await asyncio.wait_for(process.wait(), 30) == 1


async def test_unusable_setting_is_named_and_ends_the_process() -> None:
    async with _worker_process() as process:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert "HEADRACE_MODEL: is required" in errors.decode()
        assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("name", ["served_model_name", "worker_id"])
def test_name_that_no_subject_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"HEADRACE_{name.upper()}: name 'xx"):
        _identity(WorkerConfig(model=DEMO_MODEL, **{name: "x" * 129}))


def test_worker_that_can_read_no_grammar_says_so_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(tokenizer: ModelTokenizer) -> None:
        raise LlguidanceMissingError

    assert _served_model(WorkerConfig(model=DEMO_MODEL), "m").golden is None
    assert "structured output" not in caplog.text
    monkeypatch.setattr(ModelTokenizer, "grammar_tokenizer", property(missing))
    _served_model(WorkerConfig(model=DEMO_MODEL), "m")
    assert "requests for structured output will be refused: " in caplog.text


async def test_worker_waits_for_jetstream_and_can_be_stopped_meanwhile(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    server.kill()
    server.has_jetstream = False
    server.start()
    settings = {"model": str(DEMO_MODEL), "simulate": "5", "nats_url": server.url}
    async with _worker_process(**settings) as served, _worker_process(**settings) as stopped:
        for process in (served, stopped):
            await _wait_for_line(process, "waiting for the queue of interactive requests")
        stopped.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(stopped.wait(), 30) == 0
        server.has_jetstream = True
        server.restart()
        await _wait_for_line(served, " serving ")


async def _wait_for_line(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while text not in (line := (await process.stderr.readline()).decode()):
            assert line, f"the worker ended without saying {text!r}"


async def test_simulated_worker_imports_no_torch() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SIMULATED_WITHOUT_TORCH, str(DEMO_MODEL))
    assert await process.wait() == 0


async def test_broken_engine_is_reported_and_its_requests_are_left_to_others(
    nats_url: str, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_worker.execution.simulated_runner import SimulatedRunner
    from tests.gpu_worker.consumer.harness import start_worker

    def explode(*_: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(SimulatedRunner, "submit", explode)
    worker = await start_worker(nats_url, gateway.model)
    answer = await gateway.publish(gateway.request())
    await wait_until(worker.worker.has_failed.is_set)
    await worker.close()
    await gateway.nats.flush()
    assert answer.finish is None
    assert await gateway.num_queued() == 1


DYING_TASK = """
import sys
from gpu_worker.__main__ import run
from gpu_worker.consumer.pull_queue import PullQueue

async def pull(self, count):
    if self._stream == "HR_INTERACTIVE":
        raise RuntimeError("a bug in pulling")

PullQueue._pull = pull
sys.exit(run())
"""


async def test_dead_task_ends_the_worker_and_is_named(nats_url: str, gateway: TestGateway) -> None:
    async with _worker_process("-c", DYING_TASK, **_settings(nats_url, gateway)) as process:
        assert process.stderr is not None
        output = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
        assert await asyncio.wait_for(process.wait(), 30) == 1
    assert "task 'pull HR_INTERACTIVE' failed" in output
    assert "a bug in pulling" in output
    assert "has_failed=True" in output


@pytest.mark.parametrize("is_shared", [True, False])
def test_worker_with_a_store_of_its_own_does_not_say_that_it_can_load_every_adapter(is_shared: bool) -> None:
    part = MagicMock()
    access = AdapterAccess(part, {}, 1 << 20, is_shared)
    adapters = WorkerAdapters(part, "w", Adapting(1, part, part), access, part, part)
    assert adapters.features == ((ADAPTER_STORE,) if is_shared else ())


async def test_consumer_is_told_what_becomes_of_the_connection_once_there_is_one() -> None:
    events = _ConnectionEvents()
    for tell in (events.lost, events.back, events.closed):
        await tell()
    events.consumer = consumer = MagicMock()
    for tell, told in (
        (events.lost, consumer.disconnected),
        (events.back, consumer.reconnected),
        (events.closed, consumer.connection_closed),
    ):
        await tell()
        assert len(consumer.method_calls) == len(told.mock_calls) == 1
        consumer.reset_mock()


@pytest.mark.parametrize(("chosen", "is_followed"), [("model", True), ("none", False)])
def test_sampling_that_the_model_advises_is_followed_where_the_operator_wants_that(
    tmp_path: Path, chosen: str, is_followed: bool
) -> None:
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    directory = _served_model(WorkerConfig(model=tmp_path, sampling_defaults=chosen), "m").directory
    assert (directory.sampling_defaults is not None) is is_followed


def test_worker_that_nats_cannot_serve_reads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: WorkerConfig, identity: Identity) -> None:
        raise ConfigError("HEADRACE_NATS_URL", f"refused for {identity.model}")

    read = MagicMock()
    monkeypatch.setattr(worker, "check_nats", refuse)
    monkeypatch.setattr(worker, "_served_model", read)
    with pytest.raises(ConfigError, match="refused for m"):
        worker._serve(WorkerConfig(model=DEMO_MODEL), Identity("w", "m", "r"), MagicMock())
    read.assert_not_called()


def test_worker_computes_with_zeros_for_subnormal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # An adapter of such numbers would make each step take 15 times as long for all.
    found = Queue[int]()

    def build(*_: object) -> None:
        numbers = torch.full((1 << 20,), 1e-39)
        engine = Thread(target=lambda: found.put(int((numbers * 1.5).count_nonzero())))
        engine.start()
        engine.join()
        raise ConfigError("HEADRACE_MODEL", "is not loaded by this test")

    monkeypatch.setattr(worker, "check_nats", lambda *_: None)
    monkeypatch.setattr(worker, "_served_model", MagicMock())
    monkeypatch.setattr(worker, "build_engine", build)
    with pytest.raises(ConfigError, match="not loaded by this test"):
        worker._serve(WorkerConfig(model=DEMO_MODEL), Identity("w", "m", "r"), MagicMock())
    assert found.get_nowait() == 0
    assert int((torch.full((8,), 1e-39) * 1.5).count_nonzero()) == 8


ORDER = msgspec.msgpack.encode(AdapterOrder("a", "1" * 64))


@pytest.mark.parametrize(
    ("data", "outcome", "error", "is_fault"),
    [
        (ORDER, None, "", False),
        (ORDER, AdapterError("the rank is too high"), "the rank is too high", False),
        (ORDER, AdapterStoreError("the store is away"), "the store is away", True),
        (b"\xc1", None, "the order cannot be read: ", False),
    ],
)
async def test_order_is_answered_with_what_came_of_it(
    data: bytes, outcome: Exception | None, error: str, is_fault: bool
) -> None:
    nats, requests = AsyncMock(), Mock(check=AsyncMock(side_effect=outcome))
    message: Any = SimpleNamespace(data=data, reply="reply")
    await AdapterOrders(nats, "w", requests, None, Mock())._answer(message)
    (subject, sent), _ = nats.publish.call_args
    reply = msgspec.msgpack.decode(sent, type=AdapterReply)
    assert (subject, reply.is_fault) == ("reply", is_fault)
    assert (reply.error or "").startswith(error)
    assert bool(reply.error) == bool(error)


async def test_worker_without_places_refuses_orders() -> None:
    nats = AsyncMock()
    message: Any = SimpleNamespace(data=ORDER, reply="reply")
    await AdapterOrders(nats, "w", None, None, Mock())._answer(message)
    reply = msgspec.msgpack.decode(nats.publish.call_args[0][1], type=AdapterReply)
    assert "HEADRACE_MAX_LORAS" in (reply.error or "")
