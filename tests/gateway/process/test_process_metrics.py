"""The metrics of several processes in one scrape."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import zlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.metrics import GatewayMetrics, MetricsCollector, make_registry
from gateway.process import process_metrics
from gateway.process.metrics_page import EVERY_ROW, page
from gateway.process.process_metrics import SLOT_BYTES, BoardCollector, MetricsBoard, drift_watch, scrape_registry
from shared.task_supervisor import TaskSupervisor
from tests.gateway.dispatch_bench import Bench
from tests.gateway.fleet.test_worker_needs import needs_of
from tests.gateway.wire_worker import until


def collector(board: MetricsBoard, slot: int, tokens: int) -> BoardCollector:
    metrics = GatewayMetrics()
    metrics.prompt_tokens = tokens
    metrics.requests[("chat", 200)] = tokens
    metrics.retry_after_error_s.observe(0.02)
    return BoardCollector(board, slot, MetricsCollector(metrics, slot))


def scrape(collector: BoardCollector) -> dict[str, dict[str, float]]:
    """Return the values of each sample by process; each family must be there once."""
    families = list(text_string_to_metric_families(generate_latest(make_registry(collector)).decode()))
    assert len({family.name for family in families}) == len(families)
    values: dict[str, dict[str, float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        values.setdefault(sample.name, {})[sample.labels["process"]] = sample.value
    return values


def test_one_scrape_of_any_process_shows_all() -> None:
    board = MetricsBoard(4)
    collectors = [collector(board, slot, tokens) for slot, tokens in enumerate((1, 20, 300))]
    for each in collectors:
        each.publish()
    for each in collectors:
        values = scrape(each)
        assert values["headrace_prompt_tokens_total"] == {"0": 1, "1": 20, "2": 300}
        assert values["headrace_requests_total"] == {"0": 1, "1": 20, "2": 300}
        assert values["headrace_retry_after_error_seconds_count"] == {"0": 1, "1": 1, "2": 1}


def test_own_metrics_are_those_of_now_and_an_ended_process_shows_none() -> None:
    board = MetricsBoard(2)
    first, second = collector(board, 0, 5), collector(board, 1, 6)
    second.publish()
    assert scrape(first)["headrace_prompt_tokens_total"] == {"0": 5, "1": 6}
    assert scrape(second)["headrace_prompt_tokens_total"] == {"1": 6}
    board.clear(1)
    assert scrape(first)["headrace_prompt_tokens_total"] == {"0": 5}


def test_forked_process_is_read_through_the_board() -> None:
    board = MetricsBoard(2)
    pid = os.fork()
    if pid == 0:
        collector(board, 1, 42).publish()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert scrape(collector(board, 0, 1))["headrace_prompt_tokens_total"] == {"0": 1, "1": 42}


def test_half_written_slot_is_left_out() -> None:
    board = MetricsBoard(2)
    collector(board, 1, 42).publish()
    board._memory[SLOT_BYTES + 100] ^= 1
    assert scrape(collector(board, 0, 1))["headrace_prompt_tokens_total"] == {"0": 1}
    board._memory[SLOT_BYTES : SLOT_BYTES + 8] = struct.pack("<II", 2**32 - 1, 7)
    assert board.read(1) == b""


def test_content_that_does_not_fit_is_refused_and_harms_no_other_slot() -> None:
    board = MetricsBoard(2)
    board.write(1, b"neighbour")
    board.write(0, b"x" * (SLOT_BYTES - 8))
    with pytest.raises(ValueError, match="do not fit"):
        board.write(0, b"x" * (SLOT_BYTES - 7))
    assert (len(board.read(0)), board.read(1)) == (SLOT_BYTES - 8, b"neighbour")


def test_what_only_another_process_has_is_shown_as_that_one_would() -> None:
    board, metrics = MetricsBoard(2), GatewayMetrics()
    metrics.requests[("chat", 200)] = 2
    metrics.retry_after_error_s.observe(0.02)
    own = MetricsCollector(metrics, 1)
    BoardCollector(board, 1, own).publish()

    def page(collector: Collector) -> list[str]:
        lines = generate_latest(make_registry(collector)).decode().splitlines()
        # These two go on while they are read.
        return [line for line in lines if not line.startswith(("headrace_process_cpu", "headrace_process_resident"))]

    assert page(BoardCollector(board, 0)) == page(own)


async def test_metrics_that_do_not_fit_are_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_metrics, "PUBLISH_INTERVAL_S", 0.001)
    board = MetricsBoard(1)
    published = collector(board, 0, 3)
    write, attempts = board.write, list[int]()

    def refuse_first(slot: int, content: bytes) -> None:
        attempts.append(slot)
        write(slot, bytes(SLOT_BYTES) if len(attempts) == 1 else content)

    monkeypatch.setattr(board, "write", refuse_first)
    publishing = asyncio.create_task(published.publish_forever())
    await until(lambda: len(attempts) >= 3)
    publishing.cancel()
    assert caplog.messages == ["metrics not shared with the other processes"]
    assert b"headrace_prompt_tokens" in board.read(0)


def test_slot_that_is_written_meanwhile_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    board = MetricsBoard(1)
    board.write(0, b"whole")
    checksums = [1, 2, zlib.crc32(b"whole")]
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda content: checksums.pop(0))
    assert board.read(0) == b"whole"
    assert checksums == []
    checksums += [1, 2, 3, crc32(b"whole")]
    assert board.read(0) == b""


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return the values of a metric without labels but the process or the stream."""
    samples = [
        sample
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    return {next(iter(sample.labels.values())): sample.value for sample in samples if sample.name == name}


WATCHES = {"watch of streams", "watch of usage", "needs for workers", "comparison of answers"}


def shown(
    bench: Bench, slot: int, board: MetricsBoard | None, tasks: TaskSupervisor
) -> AbstractAsyncContextManager[CollectorRegistry]:
    parts = needs_of(bench.dispatcher.fleet), drift_watch(bench.nats, bench.dispatcher)
    return scrape_registry(bench.nats, bench.dispatcher, *parts, slot, board, tasks)


async def test_process_alone_shows_itself_the_fleet_and_the_streams(bench: Bench) -> None:
    metrics, tasks = bench.dispatcher.counts.metrics, TaskSupervisor()
    metrics.prompt_tokens = 7
    bench.dispatcher.fleet.started = 0.0
    await bench.worker("w")
    async with shown(bench, 3, None, tasks) as registry:
        assert values(registry, "headrace_prompt_tokens_total") == {"3": 7}
        assert values(registry, "headrace_fleet_workers")[bench.model] == 1
        await until(lambda: "HR_INTERACTIVE" in values(registry, "headrace_stream_messages"))
        running = set(tasks._tasks)
        assert {task.get_name() for task in running} == WATCHES
    assert all(task.cancelled() for task in running)
    assert not tasks.has_failed.is_set()


async def test_processes_that_share_a_port_show_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "PUBLISH_INTERVAL_S", 0.01)
    board, metrics, tasks = MetricsBoard(3), bench.dispatcher.counts.metrics, TaskSupervisor()
    neighbour = GatewayMetrics()
    neighbour.prompt_tokens = 5
    BoardCollector(board, 2, MetricsCollector(neighbour, 2)).publish()
    async with shown(bench, 1, board, tasks) as registry:
        metrics.prompt_tokens = 7
        assert values(registry, "headrace_prompt_tokens_total") == {"1": 7, "2": 5}
        await until(lambda: b"headrace_prompt_tokens" in board.read(1))
        running = set(tasks._tasks)
        assert {task.get_name() for task in running} == WATCHES | {"metrics for the processes beside"}
    assert all(task.cancelled() for task in running)
    board.clear(1)
    await asyncio.sleep(0.03)
    assert board.read(1) == b""


PAGE = Path(__file__).parents[3] / "ops" / "docs" / "metrics.md"


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m gateway.process.metrics_page > ops/docs/metrics.md"


def test_names_are_unique_and_follow_the_rules() -> None:
    names = [row.name for row in EVERY_ROW]
    assert len(set(names)) == len(names)
    for row in EVERY_ROW:
        assert re.fullmatch(r"(vllm:|headrace_)[a-z0-9_]+", row.name), row.name
        # vLLM's one exception is a histogram of tokens per iteration.
        assert row.name.endswith("_total") == (row.kind == "counter") or row.name == "vllm:iteration_tokens_total"
        assert row.text.endswith(".")
        assert not {"le", "instance", "job"} & set(row.labels)
