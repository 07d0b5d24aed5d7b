"""Requests that wait for their prefixes, between workers over a real NATS server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpu_worker.consumer.prefixes import affinity, peers, waiting
from shared.conversation import ChatMessage
from shared.messages import encode
from shared.prefixes import PrefixNews
from shared.sampling import Sampling
from shared.streams import StreamLimits
from shared.subjects import peer_subject, worker_subject
from tests.gpu_worker.consumer.harness import Answer, MakeWorker, RunningWorker, TestGateway, start_worker, wait_until

# Steps that are often full, by which the rate of prefilling is known, and slow: a prefix saves more time than a busy
# machine takes to answer.
SETTINGS = {"simulate": 60.0, "max_num_batched_tokens": 64, "max_num_seqs": 16}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ANSWER_S", 5.0)
    monkeypatch.setattr(peers, "HEARD_S", 60.0)


def turn(number: int, words: str = "the pipes of the mill ") -> tuple[ChatMessage, ...]:
    """Return the messages of a turn of a conversation, which extend those of the turn before."""
    long = ChatMessage(role="user", content=words * 120)
    return (long, *(ChatMessage(role="user", content=f"{words} {place} " * 8) for place in range(number)))


async def ask(gateway: TestGateway, number: int, **fields: Any) -> Answer:
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    answer = await gateway.ask(None, messages=turn(number), sampling=sampling, **fields)
    assert answer.finish.reason == "length", answer.finish.error
    return answer


def cached(answer: Answer) -> int:
    return int(answer.finish.usage.cached_tokens)


def number(worker: RunningWorker, name: str) -> int:
    return int(getattr(worker.worker.consumer._affinity.news(), name))


async def know(workers: list[RunningWorker], holder: str) -> None:
    """Wait until workers have heard what the holder of a prefix announces."""
    known = [worker.worker.consumer._affinity._others._peers for worker in workers if worker.name != holder]
    await wait_until(lambda: all(holder in peers and peers[holder].links for peers in known))


async def test_turns_of_a_conversation_go_to_the_worker_with_its_prefix(
    gateway: TestGateway, make_worker: MakeWorker
) -> None:
    workers = [await make_worker(**SETTINGS) for _ in range(3)]
    first = await ask(gateway, 0)
    (holder,) = set(first.workers)
    await know(workers, holder)
    # Others are always the first to pull.
    await next(w for w in workers if w.name == holder).worker.consumer._interactive_queues.new.drain()
    for place in range(1, 5):
        answer = await ask(gateway, place)
        assert set(answer.workers) == {holder}
        assert cached(answer) > 0.8 * answer.finish.usage.prompt_tokens
    # Whoever computes a request acknowledges it.
    await gateway.wait_until_acknowledged()
    assert sum(number(worker, "num_handovers") for worker in workers) == 4


@pytest.mark.parametrize("reply", ["silence", "junk"])
async def test_false_announcement_delays_a_request_for_a_moment(
    gateway: TestGateway, make_worker: MakeWorker, reply: str
) -> None:
    worker = await make_worker(**SETTINGS)
    await ask(gateway, 0)
    request = gateway.request(None, messages=turn(3, "another story "))
    links = affinity.prefix_chain(request, affinity.cache_salt(request))
    assert links is not None
    offers: list[bytes] = []

    async def hear(message: Any) -> None:
        offers.append(message.data)
        if reply == "junk":
            await gateway.nats.publish(peer_subject(gateway.model, worker.name), b"\x00junk")

    await gateway.nats.subscribe(peer_subject(gateway.model, "liar"), cb=hear)
    beat = await worker.wait_for_heartbeat(lambda beat: True)
    lie = msgspec.structs.replace(beat, worker="liar", prefixes=PrefixNews(b"".join(links.links)), started=0.0)
    await gateway.nats.publish(worker_subject(gateway.model, "liar"), encode(lie))
    await know([worker], "liar")
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    answer = await (await gateway.publish(msgspec.structs.replace(request, sampling=sampling))).wait()
    assert answer.finish.reason == "length"
    assert set(answer.workers) == {worker.name}
    assert len(offers) == 1
    assert number(worker, "num_in_vain") == 1


async def test_request_that_waits_is_named_in_heartbeats_and_given_back_by_a_drain(
    gateway: TestGateway, make_worker: MakeWorker
) -> None:
    worker = await make_worker(**{**SETTINGS, "simulate": 100.0})
    await ask(gateway, 0)
    request = gateway.request(None, messages=turn(3, "another story "))
    chain = affinity.prefix_chain(request, affinity.cache_salt(request))
    assert chain is not None

    async def promise(message: Any) -> None:
        offer = affinity.decode_peer_message(message.data)
        later = affinity.Answer("liar", offer.number, "later")
        await gateway.nats.publish(peer_subject(gateway.model, worker.name), encode(later))

    await gateway.nats.subscribe(peer_subject(gateway.model, "liar"), cb=promise)
    beat = await worker.wait_for_heartbeat(lambda beat: beat.prefill_rate > 0)
    lie = msgspec.structs.replace(beat, worker="liar", prefixes=PrefixNews(b"".join(chain.links)), started=0.0)
    await gateway.nats.publish(worker_subject(gateway.model, "liar"), encode(lie))
    await know([worker], "liar")
    sequence = await gateway.publish_raw(encode(request))
    await worker.wait_for_heartbeat(lambda beat: beat.prefixes is not None and beat.prefixes.waiting == (sequence,))
    await worker.drain()
    other = await make_worker(**SETTINGS)
    answer = await gateway.answer(request.id).wait()
    assert set(answer.workers) == {other.name}


async def test_worker_that_lets_nothing_wait_announces_nothing(nats_url: str, gateway: TestGateway, model: str) -> None:
    worker = await start_worker(nats_url, model, StreamLimits(), prefix_wait_s=0.0, **SETTINGS)
    try:
        await ask(gateway, 0)
        beats = [await worker.wait_for_heartbeat(lambda beat: True) for _ in range(2)]
        assert all(beat.prefixes is None for beat in beats)
    finally:
        await worker.close()
