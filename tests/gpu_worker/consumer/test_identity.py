"""Who a worker is, and when: two of one name, and machines whose clocks are wrong."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import worker_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, wait_until


@pytest.mark.parametrize("is_older", [True, False])
async def test_of_two_workers_of_one_name_the_newer_ends(
    worker: RunningWorker, gateway: TestGateway, is_older: bool
) -> None:
    own = await worker.wait_for_heartbeat(lambda heartbeat: True)
    other = msgspec.structs.replace(own, started=own.started + (-1 if is_older else 1), pid=own.pid + 1)
    await gateway.nats.publish(worker_subject(own.model, own.worker), encode(other))
    await gateway.nats.publish(worker_subject(own.model, own.worker), b"\xc1")
    if is_older:
        await wait_until(worker.worker.has_failed.is_set)
    else:
        await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.pid == own.pid)
        assert (await gateway.ask()).finish.reason == "length"
        assert not worker.worker.has_failed.is_set()


@pytest.mark.parametrize("wrong_by_s", [3600.0, -3600.0])
async def test_worker_whose_clock_is_wrong_ends_requests_at_their_deadlines(
    make_worker: Callable[..., Awaitable[RunningWorker]],
    gateway: TestGateway,
    monkeypatch: pytest.MonkeyPatch,
    wrong_by_s: float,
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + wrong_by_s)
    await make_worker()
    assert (await gateway.ask(deadline=true_time() + 60)).finish.reason == "length"
    assert (await gateway.ask(deadline=true_time() - 1)).finish.reason == "expired"
    long = Sampling(max_tokens=4000, ignore_eos=True)
    assert (await gateway.ask(deadline=true_time() + 1, sampling=long)).finish.reason == "expired"
    for number, finish in ((60, "length"), (-1, "expired")):
        sampling, name = Sampling(max_tokens=2, ignore_eos=True), f"{gateway.model}{number}"
        deadline = true_time() + number
        job = gateway.request(id=name, lane="batch", tenant="acme", reply=None, deadline=deadline, sampling=sampling)
        await gateway.publish_job(job)
        assert (await gateway.result(name)).finish == finish
