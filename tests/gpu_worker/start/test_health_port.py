from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from gpu_worker.engine.engine import EngineStats
from gpu_worker.start import health_port
from gpu_worker.start.health_port import MAX_CONNECTIONS, SAMPLE_S, STALL_S, HealthPort, StallWatch, bind_health_port
from shared.errors import ConfigError
from tests.waiting import until

IDLE = EngineStats(
    step=7, running=0, running_batch=0, waiting=0, waiting_batch=0, max_batch_seqs=0, waiting_tokens=0, free_blocks=1,
    total_blocks=1, max_num_seqs=1, num_preemptions=0, num_prefix_queries=0, num_prefix_hits=0, prefill_rate=0,
    decode_rate=0, num_failed_steps=0, is_fatal=False,
)  # fmt: skip


def busy(step: int) -> EngineStats:
    return msgspec.structs.replace(IDLE, step=step, running=1)


def test_worker_without_work_is_never_stalled() -> None:
    watch = StallWatch()
    for sample in range(200):
        watch.note(IDLE, sample * SAMPLE_S)
    assert watch.stalled_s == 0


def test_time_counts_only_while_no_step_ends() -> None:
    watch = StallWatch()
    for sample in range(100):
        watch.note(busy(step=sample // 10), sample * SAMPLE_S)
        assert watch.stalled_s <= 9 * SAMPLE_S
    for sample in range(100, 180):
        watch.note(busy(step=10), sample * SAMPLE_S)
    assert watch.stalled_s == 79 * SAMPLE_S > STALL_S
    watch.note(busy(step=11), 180 * SAMPLE_S)
    assert watch.stalled_s == 0


def test_pause_of_the_process_is_no_stall() -> None:
    watch = StallWatch()
    watch.note(busy(1), 0.0)
    watch.note(busy(1), 3600.0)
    assert watch.stalled_s <= 2 * SAMPLE_S


async def ask(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body.strip()


async def test_probes_are_told_what_is_the_matter() -> None:
    stats, connected = [IDLE], [True]
    withdrawn: list[str | None] = [None]
    health = HealthPort(lambda: stats[0], lambda: connected[0], lambda: withdrawn[0])
    bound = bind_health_port("127.0.0.1", 0)
    assert bound is not None
    port = bound.getsockname()[1]
    await health.start(bound)
    assert await ask(port, "/health/live") == (200, "ok")
    # The first of several reasons.
    for withdrawn[0] in (None, "rank 1 is gone"):
        assert await ask(port, "/health/ready") == (503, "starting, or draining")
    withdrawn[0] = None
    health.is_taking_requests = True
    assert await ask(port, "/health/ready?verbose=1") == (200, "ok")
    withdrawn[0] = "rank 1 is gone"
    assert await ask(port, "/health/ready") == (503, "not computing at present: rank 1 is gone")
    withdrawn[0] = None
    connected[0] = False
    assert await ask(port, "/health/ready") == (503, "not connected to NATS")
    assert await ask(port, "/health/live") == (200, "ok")
    stats[0] = msgspec.structs.replace(IDLE, is_fatal=True)
    assert (await ask(port, "/health/live"))[0] == 503
    assert (await ask(port, "/metrics"))[0] == 404
    await health.close()


async def test_worker_whose_steps_do_not_end_is_neither_live_nor_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_port, "SAMPLE_S", 0.01)
    monkeypatch.setattr(health_port, "STALL_S", 0.03)
    num_samples = 0

    def stats() -> EngineStats:
        nonlocal num_samples
        num_samples += 1
        return busy(7)

    health = HealthPort(stats, lambda: True)
    bound = bind_health_port("127.0.0.1", 0)
    assert bound is not None
    await health.start(bound)
    await until(lambda: health.problem("/health/live"))
    for path in ("/health/live", "/health/ready"):
        assert await ask(bound.getsockname()[1], path) == (503, "no step has ended for 0 s")
    await health.close()
    await asyncio.sleep(0)
    before = num_samples
    await asyncio.sleep(0.05)
    # Nothing is sampled any more.
    assert num_samples == before


@pytest.fixture
async def idle_port() -> AsyncIterator[int]:
    health = HealthPort(lambda: IDLE, lambda: True)
    bound = bind_health_port("127.0.0.1", 0)
    assert bound is not None
    await health.start(bound)
    yield bound.getsockname()[1]
    await health.close()


@pytest.mark.parametrize("head", [b"", b"X", b"GET", b"\xff \xff", b"GET /health/live"])
async def test_head_that_is_none_is_answered_and_makes_no_error(idle_port: int, head: bytes) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    reader, writer = await asyncio.open_connection("127.0.0.1", idle_port)
    writer.write(head + b"\r\n\r\n")
    assert (await reader.read()).startswith((b"HTTP/1.1 404", b"HTTP/1.1 200"))
    writer.close()
    await writer.wait_closed()
    assert failures == []


async def test_client_that_leaves_within_its_head_makes_no_error(idle_port: int) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    for head in (b"GET", b"x" * (1 << 17)):
        _, writer = await asyncio.open_connection("127.0.0.1", idle_port)
        writer.write(head)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert await ask(idle_port, "/health/live") == (200, "ok")
    assert failures == []


async def test_idle_connections_are_cut_off_and_deny_no_probe(idle_port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", idle_port)
    # Those that were answered are closed, and count no more.
    for _ in range(2 * MAX_CONNECTIONS):
        assert await ask(idle_port, "/health/live") == (200, "ok")
    writer.write(b"GET /health/live HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    idle = [await asyncio.open_connection("127.0.0.1", idle_port) for _ in range(MAX_CONNECTIONS + 8)]
    assert await ask(idle_port, "/health/live") == (200, "ok")
    for reader, _ in idle[:8]:
        with contextlib.suppress(ConnectionError):
            # Before it would be for having said nothing.
            assert await asyncio.wait_for(reader.read(), 4) == b""
    for _, writer in idle:
        writer.close()


def test_taken_port_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"HEADRACE_HEALTH_PORT: 127.0.0.1:{port} cannot be used: Address already"
        ):
            bind_health_port("127.0.0.1", port)


def test_host_that_is_none_is_told_by_its_variable() -> None:
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigError, match=rf"HEADRACE_HEALTH_HOST: {host}:0 cannot be used"):
            bind_health_port(host, 0)


def test_without_a_port_nothing_is_bound() -> None:
    assert bind_health_port("127.0.0.1", None) is None
