"""Two workers with roles and a real model: what one begins the other goes on with, and both are free after the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from gpu_worker.consumer import handover, roles
from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.core import restores
from gpu_worker.execution.tiers import peer_wire
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from gpu_worker.execution.tiers.peer_tier import PeerTier
from gpu_worker.execution.tiers.transfer import NUM_OPENERS, Transfer
from shared.disaggregation import KvReady
from shared.features import GATEWAY_FEATURES
from shared.messages import GatewayHeartbeat, Request, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import drain_subject, gateway_subject
from tests.gpu_worker.consumer.harness import Answer, MakeWorker, RunningWorker, TestGateway, wait_until

_log = logging.getLogger(__name__)

PROMPT = "def function(value):\n    return value * 7\n\n" * 12
SETTINGS: dict[str, Any] = {
    "simulate": None,
    "num_threads": 1,
    "num_blocks": 256,
    "max_model_len": 2048,
    "max_num_batched_tokens": 64,
    "kv_host_bytes": 8_000_000,
}
GREEDY = Sampling(max_tokens=24, ignore_eos=True, temperature=0.0)
LONG = Sampling(max_tokens=900, ignore_eos=True, temperature=0.0)


class Pair:
    """A worker that computes prompts, one that decodes, and their gateway."""

    def __init__(self, prefill: RunningWorker, decode: RunningWorker, gateway: TestGateway) -> None:
        self.prefill = prefill
        self.decode = decode
        self.gateway = gateway

    async def begin(self, sampling: Sampling = GREEDY, text: str = PROMPT) -> tuple[Request, Answer]:
        request = self.gateway.request(text, sampling=sampling)
        return request, await self.gateway.publish(request)

    async def next_attempt(self, request: Request, begun: Answer, **changes: Any) -> Answer:
        """Publish a request again that was handed over, as a gateway does."""
        epoch = request.epoch + 1
        fields = {"epoch": epoch, "emitted": tuple(begun.token_ids), "ready": begun.finish.ready} | changes
        await self.gateway.publish_raw(encode(msgspec.structs.replace(request, **fields)), "ready")
        return self.gateway.answer(request.id, epoch)

    @property
    def is_free(self) -> bool:
        """Whether neither worker has, keeps or fetches anything."""
        giving, fetching = transfer_of(self.prefill), transfer_of(self.decode)
        rows = [entry for entries in giving.leases.host._entries for entry in entries.values()]
        is_held = len(giving.leases) or len(fetching.peers) or any(entry.num_pins for entry in rows)
        workers = (self.prefill.worker, self.decode.worker)
        num_held = sum(len(worker.consumer._held) + worker.stats.running + worker.stats.waiting for worker in workers)
        return not (is_held or num_held)

    @property
    def hit_tokens(self) -> int:
        """Tokens whose KV was fetched from the other worker."""
        readings = tiers_of(self.decode).readings()
        return next(reading.hit_tokens for reading in readings if reading.name == "peer")


def tiers_of(worker: RunningWorker) -> BlockTiers:
    tiers = worker.worker._engine._engine._tiers
    assert isinstance(tiers, BlockTiers)
    return tiers


def transfer_of(worker: RunningWorker) -> Transfer:
    transfer = tiers_of(worker).transfer
    assert transfer is not None
    return transfer


async def say_that_gateway_lives(gateway: TestGateway, features: tuple[str, ...] = GATEWAY_FEATURES) -> None:
    beat = GatewayHeartbeat(gateway=gateway.name, unclaimed=0, unclaimed_tokens=0, features=features)
    await gateway.nats.publish(gateway_subject(gateway.name), encode(beat))


@pytest.fixture
async def pair(make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch) -> Pair:
    # A busy machine may be as slow as one that hangs.
    limits = (
        (peer_wire, "FRAME_S"),
        (handover, "OPEN_S"),
        (restores, "STALL_S"),
        (restores, "_GRACE_S"),
        (roles, "HEARD_S"),
        (roles, "LEFT_S"),
    )
    for module, name in limits:
        monkeypatch.setattr(module, name, 60.0)
    prefill = await make_worker(role="prefill", **SETTINGS)
    decode = await make_worker(role="decode", **{**SETTINGS, "max_num_seqs": 1})
    made = Pair(prefill, decode, gateway)
    await say_that_gateway_lives(gateway)
    role, watch = roles_of(prefill), prefill.worker.consumer._interactive.gateways
    await wait_until(lambda: bool(role.maker and roles_of(decode).maker) and watch.knows_ready(gateway.reply), 30)
    now = asyncio.get_running_loop().time
    await wait_until(lambda: role.hands_over(now()) and bool(roles_of(decode).address(prefill.name, now())), 30)
    return made


def roles_of(worker: RunningWorker) -> Any:
    handover = worker.worker._handover
    assert handover is not None
    return handover.roles


async def test_one_worker_computes_the_prompt_and_another_goes_on(pair: Pair, make_worker: MakeWorker) -> None:
    request, begun = await pair.begin()
    await begun.wait()
    assert begun.finish.reason == "handoff"
    assert set(begun.workers) == {pair.prefill.name}
    assert 1 <= len(begun.token_ids) < 24
    ready = begun.finish.ready
    assert (ready.request, ready.epoch, ready.worker, len(ready.lease)) == (request.id, 0, pair.prefill.name, 32)
    rest = await pair.next_attempt(request, begun)
    await rest.wait()
    assert set(rest.workers) == {pair.decode.name}
    assert rest.finish.usage.cached_tokens == 0, "its prompt was computed for it"
    assert rest.finish.usage.completion_tokens == 24
    assert pair.hit_tokens > 100
    await wait_until(lambda: pair.is_free, 5)
    assert transfer_of(pair.prefill).leases.num_read == 1
    roles_of(pair.prefill).role = "both"
    whole = await pair.gateway.ask(PROMPT, sampling=GREEDY, cache_salt="another")
    assert begun.text + rest.text == whole.text


@pytest.mark.parametrize("point", ["computed", "leased", "waiting", "fetched", "decoded"])
async def test_a_cancelled_request_leaves_nothing_on_either_side(
    pair: Pair, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()
    is_read = threading.Event()
    if point == "fetched":
        read = PeerTier.read

        def wait_and_read(*arguments: Any) -> Any:
            is_read.set()
            may_read.wait(20)
            return read(*arguments)

        monkeypatch.setattr(PeerTier, "read", wait_and_read)
    other, _ = (await pair.begin(LONG, "x = ")) if point == "waiting" else (None, None)
    if other is not None:
        begun = await pair.gateway.answer(other.id).wait()
        await (await pair.next_attempt(other, begun)).wait_for_tokens(1)
    request, begun = await pair.begin(LONG if point == "decoded" else GREEDY)
    if point == "computed":
        await begun.claimed.wait()
    else:
        await begun.wait()
        assert len(transfer_of(pair.prefill).leases) == 1
    if point not in ("computed", "leased"):
        rest = await pair.next_attempt(request, begun)
        if point == "fetched":
            await asyncio.to_thread(is_read.wait, 20)
        elif point == "decoded":
            await rest.wait_for_tokens(3)
    cancelled_at = time.monotonic()
    await pair.gateway.cancel(request.id)
    if other is not None:
        await wait_until(lambda: len(transfer_of(pair.prefill).leases) == 0)
        await pair.gateway.cancel(other.id)
    # Within a second on a machine that has nothing else to do.
    await wait_until(lambda: pair.is_free, 5)
    _log.info("%s: both sides are free %.3f s after the cancellation", point, time.monotonic() - cancelled_at)
    may_read.set()


@pytest.mark.parametrize("what", ["epoch", "request", "worker", "lease"])
async def test_a_place_that_is_not_of_this_attempt_is_not_asked(pair: Pair, what: str) -> None:
    request, begun = await pair.begin()
    await begun.wait()
    wrong = {"epoch": 7, "request": "another", "worker": "nobody", "lease": "0" * 32}
    ready: KvReady = msgspec.structs.replace(begun.finish.ready, **{what: wrong[what]})
    rest = await (await pair.next_attempt(request, begun, ready=ready)).wait()
    assert rest.finish.reason == "length"
    assert pair.hit_tokens == 0


@pytest.mark.parametrize("is_begun", [False, True])
async def test_threads_that_open_leases_are_not_waited_for_where_other_workers_hold_them(
    pair: Pair, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "OPEN_S", 0.1)
    may_go_on, open_lease, opened = threading.Event(), PeerTier.open, list[bool]()

    def wait_and_open(*arguments: Any) -> bool:
        may_go_on.wait(60)
        opened.append(open_lease(*arguments))
        return opened[-1]

    monkeypatch.setattr(PeerTier, "open", wait_and_open)
    transfer = transfer_of(pair.decode)
    for _ in range(0 if is_begun else NUM_OPENERS):
        transfer.openers.submit(may_go_on.wait, 60)
    request, begun = await pair.begin()
    await begun.wait()
    rest = await (await pair.next_attempt(request, begun)).wait()
    assert (rest.finish.reason, pair.hit_tokens) == ("length", 0)
    may_go_on.set()
    await wait_until(lambda: opened == [True] * is_begun and not len(transfer.peers), 10)
    await pair.gateway.cancel(request.id)
    await wait_until(lambda: pair.is_free, 5)


async def test_worker_that_opens_no_lease_leaves_threads_to_other_workers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "OPEN_S", 60.0)
    fetching, may_go_on, opened = pair.decode.worker._handover, threading.Event(), list[str]()

    def open_lease(peers: PeerTier, worker: str, *lease: Any) -> bool:
        if worker == "liar":
            may_go_on.wait(60)
        opened.append(worker)
        return False

    monkeypatch.setattr(PeerTier, "open", open_lease)
    monkeypatch.setattr(roles.Roles, "address", lambda *_: "127.0.0.1:9")
    assert fetching is not None

    async def fetch(worker: str, number: int) -> None:
        ready = KvReady(f"r{number}", 0, worker, f"{number:032}", 0)
        request = pair.gateway.request(id=ready.request, epoch=1, emitted=(5,), ready=ready)
        await fetching.fetch(HeldRequest(request.id, request, QueuedMessage("subject", b"", "", 1, 1, 0)), 100)

    lying = [asyncio.create_task(fetch("liar", number)) for number in range(NUM_OPENERS)]
    await asyncio.sleep(0)
    await asyncio.wait_for(fetch("other", 99), 30)
    assert opened == ["other"]
    may_go_on.set()
    await asyncio.gather(*lying)
    assert opened == ["other", *["liar"] * NUM_OPENERS]


@pytest.mark.parametrize("ending", ["late", "cancelled"])
async def test_an_attempt_that_opens_its_lease_too_late_leaves_the_next_attempt_its_own(
    pair: Pair, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ending == "late":
        monkeypatch.setattr(handover, "OPEN_S", 0.1)
    is_opening, may_go_on, open_lease = threading.Event(), threading.Event(), PeerTier.open
    opened, closers = list[bool](), list[str]()

    def open_first_late(
        peers: PeerTier, worker: str, address: str, lease: str, request: str, epoch: int, size: int
    ) -> bool:
        if epoch == 1:
            is_opening.set()
            may_go_on.wait(60)
        opened.append(open_lease(peers, worker, address, lease, request, epoch, size))
        return opened[-1]

    def note_thread(*arguments: Any, **options: Any) -> None:
        closers.append(threading.current_thread().name)
        close(*arguments, **options)

    close = PeerTier.close
    monkeypatch.setattr(PeerTier, "open", open_first_late)
    monkeypatch.setattr(PeerTier, "close", note_thread)
    first, second, digest = await two_attempts(pair)
    fetching, kv = pair.decode.worker._handover, transfer_of(pair.decode)
    assert fetching is not None
    attempt = asyncio.create_task(fetching.fetch(first, 1000))
    await asyncio.to_thread(is_opening.wait, 30)
    if ending == "cancelled":
        attempt.cancel()
    (result,) = await asyncio.gather(attempt, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError) is (ending == "cancelled")
    monkeypatch.setattr(handover, "OPEN_S", 60.0)
    await fetching.fetch(second, 1000)
    assert (opened, len(kv.peers)) == ([True], 1)
    may_go_on.set()
    await wait_until(lambda: bool(closers) and opened == [True, True] and len(kv.peers) == 1, 10)
    assert kv.peers.has(0, digest), "it is the second's"
    assert list(kv.peers._sessions) == [(second.request.id, 2)]
    assert all(name.startswith("kv-open") for name in closers)
    pair.decode.worker.consumer._held.remove(second)
    await wait_until(lambda: not len(kv.peers), 10)


async def two_attempts(pair: Pair) -> tuple[HeldRequest, HeldRequest, bytes]:
    """Return two attempts of one request, each with a lease, the second held by the worker that decodes."""
    request, begun = await pair.begin()
    ready, leases = (await begun.wait()).finish.ready, transfer_of(pair.prefill).leases
    (lease,) = leases._by_token.values()
    digests = [digest for _, digest in lease.rows]
    later = leases.grant(request.id, 2, lease.salt, digests)
    assert later is not None
    attempts = []
    for epoch, token in ((1, ready.lease), (2, later.token)):
        place = msgspec.structs.replace(ready, epoch=epoch - 1, lease=token)
        message = QueuedMessage("subject", b"", "", 1, 1, 0)
        attempts.append(HeldRequest(request.id, msgspec.structs.replace(request, epoch=epoch, ready=place), message))
    pair.decode.worker.consumer._held.add(attempts[1])
    return attempts[0], attempts[1], digests[0]


async def test_a_worker_that_drains_waits_until_what_it_keeps_is_fetched(pair: Pair) -> None:
    request, begun = await pair.begin()
    await begun.wait()
    draining = asyncio.create_task(pair.prefill.drain(30))
    await pair.prefill.wait_for_heartbeat(lambda beat: beat.draining)
    await (await pair.next_attempt(request, begun)).wait()
    await asyncio.wait_for(draining, 10)
    assert pair.hit_tokens > 100


async def test_prompts_are_computed_where_the_prefill_worker_has_ended_and_left_to_one_that_is_slow(pair: Pair) -> None:
    role, now = roles_of(pair.decode), asyncio.get_running_loop().time
    role._started_at -= roles.HEARD_S
    pair.prefill.worker.consumer._is_silent = True
    await asyncio.sleep(4 * roles.MISSED_S)
    assert (role.missed(now()), role.takes(now())) == ([pair.prefill.name], ("ready",))
    _, answer = await pair.begin()
    assert set((await answer.wait(60)).workers) == {pair.prefill.name}
    # Silence alone says so after a minute here.
    await pair.prefill.close()
    await wait_until(lambda: "interactive" in role.takes(now()))
    _, answer = await pair.begin()
    assert set((await answer.wait(60)).workers) == {pair.decode.name}


async def test_a_request_of_a_gateway_that_does_not_know_of_this_stays(pair: Pair) -> None:
    await say_that_gateway_lives(pair.gateway, ())
    watch = pair.prefill.worker.consumer._interactive.gateways
    await wait_until(lambda: not watch.knows_ready(pair.gateway.reply))
    _, answer = await pair.begin()
    assert (await answer.wait()).finish.reason == "length"
    assert set(answer.workers) == {pair.prefill.name}


async def test_a_role_is_changed_by_an_order_and_a_wrong_one_is_refused(
    pair: Pair, make_worker: MakeWorker, nats_url: str
) -> None:
    admin = await connect(nats_url, role="admin", name="test")
    assert await order(admin, pair.prefill, b"role nothing") == (
        b"role: must be one of prefill, decode, both, not 'nothing'"
    )
    assert await order(admin, pair.prefill, b"role decode") == b""
    assert await order(admin, pair.decode, b"role prefill") == b""
    await pair.prefill.wait_for_heartbeat(lambda beat: beat.roles is not None and beat.roles.takes == ("ready",))
    await wait_until(lambda: roles_of(pair.decode).hands_over(asyncio.get_running_loop().time()))
    # What it had pulled for before has expired.
    await wait_until(lambda: pair.prefill.worker.consumer._interactive_queues.new.outstanding == 0)
    request, begun = await pair.begin()
    assert set((await begun.wait()).workers) == {pair.decode.name}
    rest = await (await pair.next_attempt(request, begun)).wait()
    assert set(rest.workers) == {pair.prefill.name}
    plain = await make_worker()
    assert b"started without --role" in await order(admin, plain, b"role both")
    await admin.close()


async def order(admin: Client, worker: RunningWorker, content: bytes) -> bytes:
    return (await admin.request(drain_subject(worker.name), content, timeout=10)).data
