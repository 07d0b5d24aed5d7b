"""Incident class: duplicate ids. An id published twice gets one answer, and no client gets another's."""

from __future__ import annotations

from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, fresh_name

LONG = Sampling(max_tokens=200, ignore_eos=True, seed=1)
OTHER = Sampling(max_tokens=200, ignore_eos=True, seed=2)


async def test_id_that_is_being_answered_goes_on_with_its_own_tokens(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    alone = await gateway.ask("x = ", sampling=LONG)
    name = fresh_name("twice")
    answer = await gateway.publish(gateway.request("x = ", id=name, sampling=LONG))
    await answer.wait_for_tokens(1)
    for _ in range(5):
        await gateway.publish(gateway.request("y = ", id=name, sampling=OTHER))
    assert (await answer.wait()).token_ids == alone.token_ids
    assert [delta.finish for delta in answer.deltas if delta.finish] == [answer.finish]
    await gateway.wait_until_acknowledged()


async def test_burst_of_one_id_is_answered_once(worker: RunningWorker, gateway: TestGateway) -> None:
    name = fresh_name("burst")
    request = gateway.request("x = ", id=name, sampling=LONG)
    for _ in range(20):
        answer = await gateway.publish(request)
    finished = await answer.wait()
    assert len(finished.token_ids) == 200
    assert [delta.seq for delta in finished.deltas if delta.token_ids] == list(range(200))
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)


async def test_newer_epoch_replaces_the_older_and_an_older_changes_nothing(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    name = fresh_name("epochs")
    old = await gateway.publish(gateway.request("x = ", id=name, epoch=5, sampling=LONG))
    await old.wait_for_tokens(1)
    new = await gateway.publish(gateway.request("x = ", id=name, epoch=6, sampling=LONG))
    await gateway.publish(gateway.request("x = ", id=name, epoch=4, sampling=OTHER))
    assert len((await new.wait()).token_ids) == 200
    last = old.deltas[-1]
    assert (last.token_ids, last.epoch) == ((), 5), "its end is of its own epoch, for its receipt alone"
    assert last.finish.reason == "cancelled"
    assert not gateway.answer(name, 4).deltas
