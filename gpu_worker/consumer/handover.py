"""Hands requests over to workers that decode, and fetches the KV of those that were handed over to this one.

A prefill worker gives a request up behind its first token: the engine drops it, its blocks are leased, and the gateway
publishes it again with the lease. Who takes it then opens the lease before the engine has the request; the blocks are
restored as those of any lower tier are, and the lease is over with the first token. All that fails on the way costs
time: the next worker computes the prompt and the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, log_fields
from gpu_worker.consumer.roles import Roles
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine_thread import EngineThread
from shared.disaggregation import ROLES, KvReady, RoleNews, as_role
from shared.errors import DependencyError
from shared.messages import Cancel, Request
from shared.nats_connection import SEND_ERRORS
from shared.task_supervisor import TaskSupervisor

if TYPE_CHECKING:
    from gpu_worker.consumer.interactive_lane import InteractiveLane
    from gpu_worker.consumer.interactive_queues import InteractiveQueues
    from gpu_worker.execution.tiers.transfer import Transfer

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
_WATCH_INTERVAL_S = 0.1
_LEFT_INTERVAL_S = 1.0
OPEN_S = 1.0
"""A lease that is not open by then is not waited for: workers that do not answer may hold all threads that open."""
_LEAST_TOKENS = 32
"""Fewer are computed sooner than their KV is found."""


class KvHandover:
    """One worker's part in computing prompts and answers on different workers.

    Attributes:
        num_handed_over: Requests that were handed over with KV.
    """

    def __init__(self, worker: str, transfer: Transfer, roles: Roles, engine: EngineThread, held: HeldRequests) -> None:
        self.roles = roles
        self.num_handed_over = 0
        self._worker = worker
        self._transfer = transfer
        self._engine = engine
        self._held = held
        self._lane: InteractiveLane | None = None
        self._queues: InteractiveQueues | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # By worker, so that one that does not answer leaves half of the threads that open leases to others.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def start(
        self,
        lane: InteractiveLane,
        queues: InteractiveQueues,
        tasks: TaskSupervisor,
        has_ended: Callable[[str], Awaitable[bool]],
    ) -> None:
        """Hand requests of a lane over from now on. Call it on the event loop. `has_ended` asks NATS for a worker."""
        self._lane, self._queues, self._loop = lane, queues, asyncio.get_running_loop()
        tasks.every(SWEEP_INTERVAL_S, self._sweep, "leases of KV")
        tasks.every(_WATCH_INTERVAL_S, partial(self._watch_others, has_ended), "watch of other roles")
        tasks.every(_LEFT_INTERVAL_S, self._watch_left, "watch of queues left to others")

    def taken_queues(self) -> Collection[str]:
        """Return the queues from which this worker takes requests at present."""
        return self.roles.takes(time.monotonic())

    def set_role(self, name: str) -> str:
        """Take on a role; return the error message, or an empty string."""
        role = as_role(name)
        if role is None:
            return f"role: must be one of {', '.join(ROLES)}, not {name[:40]!r}"
        self.roles.role = role
        _log.info("the role is %s from now on", role)
        if self._queues is not None:
            self._queues.wake()
        return ""

    def note_first_output(self, held: HeldRequest) -> None:
        """Hand a request over that has its first output, if another worker goes on with such requests.

        The KV of one that was handed over to this worker is not needed elsewhere any more.
        """
        self.let_go(held, is_done=True)
        sequence, request = held.sequence, held.request
        # With a budget it may have evicted some of what another worker would fetch.
        if sequence is None or held.probation or request.lane != "interactive" or request.kv_budget is not None:
            return
        if self._lane is None or request.reply is None or not self._lane.gateways.knows_ready(request.reply):
            return
        if not (self._held.is_current(held) and self.roles.hands_over(time.monotonic())):
            return
        num_blocks = -(-sequence.num_prompt_tokens // max(1, self._transfer.block_tokens))
        # Without room the decode workers are behind: going on here is faster than computing the prompt again there.
        if self._transfer.leases.has_room(num_blocks * self._transfer.block_bytes, sequence.tenant):
            self._engine.hand_over(sequence.id, partial(self._left_engine, held))

    def _left_engine(self, held: HeldRequest, sequence: Sequence) -> None:
        """Lease what a sequence has left behind. Called on the engine's thread."""
        lease = None
        if sequence.num_prompt_tokens >= _LEAST_TOKENS:
            leases, epoch = self._transfer.leases, held.request.epoch + 1
            lease = leases.grant(held.request.id, epoch, sequence.salt, sequence.block_digests, sequence.tenant)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._left, held, sequence, "" if lease is None else lease.token)

    def _left(self, held: HeldRequest, sequence: Sequence, token: str) -> None:
        request = held.request
        if self._lane is None or not self._held.is_current(held):
            self._transfer.leases.cancel(request.id, request.epoch + 1)
            return
        self.num_handed_over += bool(token)
        self._lane.hand_over(held, KvReady(request.id, request.epoch, self._worker, token, sequence.num_cached_tokens))

    async def fetch(self, held: HeldRequest, num_prompt_tokens: int) -> None:
        """Open the lease of a request that was handed over to this worker, if that takes no longer than `OPEN_S`."""
        request, ready = held.request, held.request.ready
        if ready is None or not ready.lease or (ready.request, ready.epoch + 1) != (request.id, request.epoch):
            return
        address = self.roles.address(ready.worker, time.monotonic())
        if address is None:
            return
        attempt = request.id, request.epoch, num_prompt_tokens + len(request.emitted)
        is_open, opening = False, None
        turns = self._turns.setdefault(ready.worker, asyncio.Semaphore(self._transfer.num_openers // 2))
        try:
            async with asyncio.timeout(OPEN_S):
                await turns.acquire()
                opening = self._open(turns, ready.worker, address, ready.lease, *attempt)
                is_open = await asyncio.wrap_future(opening)
        except (TimeoutError, asyncio.CancelledError) as error:
            # An `open` that waits for a thread is cancelled; one that runs may still open a session.
            if opening is not None:
                opening.add_done_callback(partial(self._close_late, request))
            if isinstance(error, asyncio.CancelledError):
                raise
        if not is_open:
            _log.info("the KV of a request is not there; its prompt is computed", extra=log_fields(request))
        elif not self._held.is_current(held):
            self.let_go(held)

    def _open(self, turns: asyncio.Semaphore, *lease: Any) -> Future[bool]:
        """Open a lease in a thread, with one of a worker's turns, which ends with the thread's work."""
        loop = asyncio.get_running_loop()

        def end_turn(_: Future[bool]) -> None:
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(turns.release)

        opening = self._transfer.openers.submit(self._transfer.peers.open, *lease)
        opening.add_done_callback(end_turn)
        return opening

    def _close_late(self, request: Request, opening: Future[bool]) -> None:
        if not opening.cancelled():
            self._close(request)

    def let_go(self, held: HeldRequest, *, is_done: bool = False) -> None:
        """Close the request's KV connection; `is_done` tells the sender that all was read."""
        if held.request.ready is not None and len(self._transfer.peers):
            self._close(held.request, is_done=is_done)

    def _close(self, request: Request, *, is_done: bool = False) -> None:
        """Close the connection of an attempt in a thread: it may wait for a lock, or for a full send buffer."""
        # After `Transfer.close` there are neither threads nor connections.
        with contextlib.suppress(RuntimeError):
            self._transfer.openers.submit(self._transfer.peers.close, request.id, request.epoch, is_done=is_done)

    def cancel(self, cancel: Cancel) -> None:
        """Free the leases of cancelled requests."""
        if cancel.tenant is None and len(self._transfer.leases):
            for request_id in cancel.ids:
                self._transfer.leases.cancel(request_id, cancel.epoch)

    async def drain(self, timeout_s: float) -> None:
        """Wait until all leased contents are fetched, or the timeout."""
        await asyncio.to_thread(self._transfer.leases.wait_for_end, timeout_s)

    def close(self) -> None:
        """Give and fetch nothing more."""
        self._transfer.close()

    def news(self, *, is_withdrawn: bool, last_ready: int, last_ready_returned: int) -> RoleNews:
        """Return what the next heartbeat says of the role."""
        return RoleNews(
            self.roles.role,
            () if is_withdrawn else self.roles.takes(time.monotonic()),
            self._transfer.server.address,
            self._transfer.maker,
            last_ready,
            last_ready_returned,
            self.num_handed_over,
        )

    async def _sweep(self) -> None:
        self._transfer.leases.sweep(time.monotonic())
        self.roles.maker = self._transfer.maker
        if self._queues is not None:
            with contextlib.suppress(DependencyError, *SEND_ERRORS):
                await self._queues.start_ready()

    async def _watch_others(self, has_ended: Callable[[str], Awaitable[bool]]) -> None:
        """Do the part of a worker as soon as NATS says that it has ended, before it counts as silent.

        A prefill worker that went on handing over would get each request back for the next token.
        """
        asked_at = time.monotonic()
        for worker in self.roles.missed(asked_at):
            if await has_ended(worker) and self._queues is not None:
                self.roles.note_ended(worker, asked_at)
                self._queues.wake()

    async def _watch_left(self) -> None:
        """Do the part of workers that take nothing, whatever their heartbeats say."""
        left_queues, left = self.roles.left_queues, self.roles.left(time.monotonic())
        if self._queues is None or not left:
            left_queues.forget()
            return
        with contextlib.suppress(DependencyError, *SEND_ERRORS):
            for queue in left:
                deliveries = await self._queues.deliveries(queue)
                if deliveries is not None:
                    left_queues.note(queue, deliveries, time.monotonic())
        if left_queues.helps(time.monotonic()):
            self._queues.wake()
