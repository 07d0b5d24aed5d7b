"""What tenants can learn of each other at a worker, and the id under which a request appears in its log lines."""

from __future__ import annotations

import logging

import pytest

from gpu_worker.consumer.request_reader import RequestReader
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import (
    RunningWorker,
    TestGateway,
)

LONG = "x = 1\n" * 200


async def test_prefix_that_another_tenant_computed_is_no_hit(worker: RunningWorker, gateway: TestGateway) -> None:
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    cached = []
    for tenant in ("one", "one", "other", "other"):
        answer = await gateway.ask(LONG, tenant=tenant, sampling=sampling)
        cached.append(answer.finish.usage.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 500


async def test_request_is_named_in_log_lines_by_the_id_of_its_http_answer(
    worker: RunningWorker, gateway: TestGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RequestReader, "sequence", broken)
    with caplog.at_level(logging.ERROR):
        answer = await gateway.ask(trace="req_from_the_client")
    assert answer.finish.reason == "failed"
    assert [record.request_id for record in caplog.records if hasattr(record, "request_id")] == ["req_from_the_client"]


async def test_engine_is_given_the_id_for_its_log_lines(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []
    engine = worker.worker._engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda sequence: (traces.append(sequence.trace), add(sequence)))
    await gateway.ask(trace="req_1")
    await gateway.ask()
    assert traces == ["req_1", ""]
