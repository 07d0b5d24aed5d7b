"""The streams that this process generates: from their sequences into the log, to their end or to another owner.

A stream goes on without a client for the grace period. Its key's share of limits is held until it has ended. Then its
tokens are counted, only by this process, whichever gateways have sent the answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from gateway.api.sequences import SequenceWindow
from gateway.api.usage import count_answer
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.inflight import EPOCHS_OF_ONE, Flight
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.resumable.live import LiveStream, LoggedSink, fail, unfinished
from gateway.resumable.log import ERRORS, StreamLog, answering, stopped, unavailable
from gateway.resumable.record import StreamHead, decode_requests
from gateway.resumable.writer import LogWriter
from shared.background_tasks import BackgroundTasks
from shared.features import JOURNAL
from shared.log_limit import LogLimit
from shared.messages import Request

# Running streams of a tenant that one process owns.
MAX_OWNED = 1024
# After a takeover, when the pieces of the owner before are dropped, in seconds.
_PURGE_S = (5.0, 15.0)

_log = logging.getLogger(__name__)


class StreamLimits(Struct, frozen=True):
    """How long a stream is generated without a client and kept after its end, in seconds; and bytes of its log."""

    grace_s: float = 60.0
    keep_s: float = 600.0
    max_bytes: int = 4 << 20


class StreamOwner:
    """Owns streams under its writer's name, a new one after another process has taken them over."""

    def __init__(
        self,
        log: StreamLog,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        limits: StreamLimits,
        on_disowned: Callable[[LiveStream], None],
        on_revoked: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Generate over `dispatcher`, and write to `log`.

        `on_disowned` is called with each stream that belongs to another process now, or has ended; `on_revoked` is run
        when this process has a new name.
        """
        self._log = log
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._limits = limits
        self._on_disowned = on_disowned
        self._on_revoked = on_revoked
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._log_limit = LogLimit(_log)
        self._num_of: Counter[str] = Counter()
        self._graces: dict[LiveStream, asyncio.TimerHandle] = {}
        self.writer = self._new_writer()

    def check_room(self, tenant: str) -> None:
        """Refuse one stream more than a tenant may have here; `ApiError` 429 (`too_many_streams`)."""
        if self._num_of[tenant] >= MAX_OWNED:
            message = f"This gateway generates {MAX_OWNED} resumable streams of this tenant already."
            raise ApiError(429, message, code="too_many_streams", retry_after_s=5.0)

    def sinks(self, stream: LiveStream) -> list[LoggedSink]:
        """Return the sinks of all sequences of a stream."""
        return [LoggedSink(stream, index, self._note) for index in range(stream.generation.num_sequences)]

    def begin(self, stream: LiveStream) -> None:
        """Own a stream that has no head yet: its entries wait."""
        stream.has_ends = bool(stream.entries)
        self.writer.own(stream)
        self._num_of[stream.head.tenant] += 1

    def opened(self, stream: LiveStream, seq: int) -> None:
        """Write the entries of a stream from now on, whose head has the number `seq`."""
        stream.seq = seq
        stream.caught_up.set()
        stream.ended.add_done_callback(lambda _: self._ended(stream))
        if stream.entries:
            self.writer.note(stream)

    def give_up(self, stream: LiveStream) -> None:
        """Own a stream no longer that was never opened."""
        self._release(self.writer, stream)

    def _release(self, writer: LogWriter, stream: LiveStream) -> None:
        writer.disown(stream)
        self._num_of[stream.head.tenant] -= 1
        if stream.window is not None:
            stream.window.stop()
            self._dispatcher.let_go(stream.window.flights)
        if stream.lease is not None:
            stream.lease.release(sum(stream.delivered()))
            stream.lease = None
        stream.disown()

    def review_grace(self, stream: LiveStream) -> None:
        """Let the grace period of a stream that is not read here begin, or begin anew."""
        grace = self._graces.pop(stream, None)
        if grace is not None:
            grace.cancel()
        if stream in self.writer.owned and not stream.has_views and not stream.ended.done():
            self._graces[stream] = self._loop.call_later(self._limits.grace_s, self._leave_alone, stream)

    def followed(self, stream: LiveStream) -> None:
        """Note that another process reads a stream now."""
        if not stream.is_followed:
            stream.is_followed = True
            self._note(stream)
        self.review_grace(stream)

    def stop(self, stream: LiveStream) -> None:
        """End a stream because its client wants that, and forget it."""
        stream.is_deleted = True
        self._fail(stream, stopped())

    async def take_over(self, stream: LiveStream) -> bool:
        """Own a dead owner's stream, whose entries were read; False if another gateway was faster.

        Raises `ApiError` 410 if a part of it is no longer kept, 503 if the log does not answer or the tenant has many.
        """
        head = stream.head
        if self._num_of[head.tenant] >= MAX_OWNED:
            raise unavailable()
        seq, stream.head = stream.seq, msgspec.structs.replace(head, owner=self.writer.name, term=head.term + 1)
        self.begin(stream)
        new_seq, pieces, requests = None, list[bytes](), list[Request]()
        try:
            with answering():
                pieces, is_settled = await asyncio.gather(self._log.requests(head), self.writer.settle(stream))
                requests = decode_requests(pieces, head.form.n)
            if is_settled:
                new_seq = await self._log.replace(stream.head, seq)
        except ERRORS as error:
            _log.warning("stream %s could not be taken over: %r", head.id, error)
        finally:
            if new_seq is None or stream.ended.done():
                # Another process was faster, or this one stops.
                self.give_up(stream)
                stream.head = head
        if new_seq is None or stream.head is head:
            return False
        if head.owner != stream.head.owner:
            # Others are taken over at the same time: a purge keeps NATS from answering them.
            self._loop.call_later(random.uniform(*_PURGE_S), self._forget, self._log.delete_pieces, head)
        stream.started, stream.requests, stream.is_held = time.perf_counter(), pieces, False
        stream.show(len(stream.entries))
        self._resume(stream, requests)
        self.opened(stream, new_seq)
        self.review_grace(stream)
        return True

    def hand_over(self, error: ApiError) -> None:
        """Generate nothing more: another gateway goes on. Answers of this process end with an error."""
        for stream in list(self.writer.owned):
            stream.cut_views(error)
            self._disown(self.writer, stream)

    async def close(self) -> None:
        """Wait for running tasks."""
        await self.writer.close()
        for grace in self._graces.values():
            grace.cancel()
        await self._tasks.wait()

    def _new_writer(self) -> LogWriter:
        limits = self._limits
        may_use_journal = partial(self._dispatcher.fleet.do_gateways_understand, JOURNAL)
        return LogWriter(
            self._log, limits.max_bytes, may_use_journal, self._revoked, self._silent, self._lost, self._too_large
        )

    def _note(self, stream: LiveStream) -> None:
        if stream.is_cut:
            stream.show_unkept()
        elif stream.seq and stream in self.writer.owned:
            self.writer.note(stream)

    def _resume(self, stream: LiveStream, requests: list[Request]) -> None:
        deltas, form = stream.deltas(), stream.head.form
        places, sinks = unfinished(deltas), self.sinks(stream)
        epoch = stream.head.term * EPOCHS_OF_ONE

        def submit(place: int, sink: Sink) -> Flight:
            index = places[place]
            tokens = 0 if index % form.n else form.prompt_tokens[index // form.n]
            return self._dispatcher.take_over(requests[index], sink, tokens, epoch, deltas[index])

        window = SequenceWindow(submit, self._dispatcher.cancel, [sinks[place] for place in places], form.num_at_once)
        stream.window = window
        try:
            window.begin()
        except ApiError as error:
            self._fail(stream, error)

    def _fail(self, stream: LiveStream, error: ApiError) -> None:
        if stream in self.writer.owned and not stream.ended.done():
            fail(stream, error)
            self._note(stream)

    def _leave_alone(self, stream: LiveStream) -> None:
        self._graces.pop(stream, None)
        if not stream.has_views:
            message = f"The generation was cancelled: no client has read the stream for {self._limits.grace_s:g} s."
            self._fail(stream, ApiError(408, message, code="stream_abandoned"))

    def _disown(self, writer: LogWriter, stream: LiveStream) -> None:
        self._release(writer, stream)
        self.review_grace(stream)
        self._on_disowned(stream)

    def _revoked(self) -> None:
        """Have a new name: another process has taken the streams over, or will when it is asked for them."""
        _log.warning("another gateway has taken over the %d resumable streams of this one", len(self.writer.owned))
        lost, self.writer = self.writer, self._new_writer()
        for stream in list(lost.owned):
            self._disown(lost, stream)
        self._tasks.spawn(self._on_revoked(), "new name of this gateway's streams")

    def _silent(self, stream: LiveStream) -> None:
        stream.abort(unavailable())

    def _lost(self, stream: LiveStream) -> None:
        """Write the head of a stream again: the log was lost with NATS."""
        self._tasks.spawn(self._write_again(stream), f"head of stream {stream.head.id}")

    async def _write_again(self, stream: LiveStream) -> None:
        try:
            stream.seq = await self._log.create(stream.head, stream.requests)
        except ApiError as error:
            self._log_limit.warning("", "the head of a stream could not be written again: %r", error)
            return
        if stream.ended.done():
            # Its end was noted under the number of the lost head, so in vain: the new head says that it runs.
            await self._keep(stream)

    def _too_large(self, stream: LiveStream) -> None:
        stream.is_cut = True
        head = stream.head
        _log.warning("the log of stream %s is larger than %d bytes: dropped", head.id, self._limits.max_bytes)
        stream.head = msgspec.structs.replace(head, is_cut=True)
        stream.show_unkept()
        self._tasks.spawn(self._store_cut(stream), f"cut of stream {head.id}")

    async def _store_cut(self, stream: LiveStream) -> None:
        try:
            stream.seq = await self._log.replace(stream.head, stream.seq) or stream.seq
            await self._log.delete_pieces(stream.head)
        except ERRORS as error:
            self._log_limit.warning("", "a stream that is too large is kept for a while: %r", error)

    def _ended(self, stream: LiveStream) -> None:
        if stream not in self.writer.owned:
            return
        self.writer.disown(stream)
        self._num_of[stream.head.tenant] -= 1
        self.review_grace(stream)
        if stream.window is not None:
            stream.window.cancel()
            # Its sinks refer to the stream: without that, it is freed at once, and not by the garbage collector.
            stream.window = None
        self._count(stream)
        self._tasks.spawn(self._keep(stream), f"end of stream {stream.head.id}")
        self._on_disowned(stream)

    def _count(self, stream: LiveStream) -> None:
        usage, failure, is_complete = stream.usage, stream.failure, stream.is_complete
        is_free = failure is not None and failure.status not in (408, 409)
        if not is_complete:
            usage.count_delivered(*stream.delivered())
        head, started = stream.head, stream.started
        count_answer(self._metrics, stream.generation, head.tenant, usage, started, is_complete=is_complete)
        if stream.lease is not None:
            stream.lease.release(0 if is_free else usage.prompt_tokens + usage.completion_tokens)
            stream.lease = None

    async def _keep(self, stream: LiveStream) -> None:
        """Log the end of a stream, and delete it after its time; delete the key of a failed one at once."""
        head = stream.head
        try:
            if stream.is_deleted:
                await self._log.delete(head)
                return
            ended = msgspec.structs.replace(head, ended=self._dispatcher.clock.now())
            stream.head = ended
            if await self._log.replace(ended, stream.seq) is None:
                return
            if head.key_digest is not None and not stream.is_complete:
                await self._log.release_key(head.tenant, head.key_digest, head.key_seq)
        except ERRORS as error:
            self._log_limit.warning("", "the end of a stream could not be noted: %r", error)
            return
        self._loop.call_later(self._limits.keep_s, self._forget, self._log.delete, ended)

    def _forget(self, delete: Callable[[StreamHead], Coroutine[Any, Any, None]], head: StreamHead) -> None:
        async def forget() -> None:
            try:
                await delete(head)
            except ERRORS as error:
                self._log_limit.warning("", "a stream, or a dead gateway's copy, is kept for longer: %r", error)

        self._tasks.spawn(forget(), f"forget stream {head.id}")
