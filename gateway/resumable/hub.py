"""The streams of this process: begun here, followed because another gateway generates them, or taken over from one.

The gateway that begins a stream owns it: it dispatches its sequences, moves them when workers die, and writes what they
deliver into the log. Another gateway that is asked for the stream follows the log, as long as the owner answers its
calls. If the owner does not, the follower revokes its fence, reads what it has logged, and compares-and-sets the head;
then it owns the stream and dispatches its sequences again, behind the tokens of the log and in a later epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

from gateway.admission.auth import Principal
from gateway.admission.limits import Lease
from gateway.admission.stored_reads import ReadSize
from gateway.api.answer import Answer, Asked
from gateway.api.endpoint import GenerationStart, IdempotencyKey, LoggedGeneration, RepeatedError
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError, shutting_down
from gateway.http1.head import REQUEST_ID
from gateway.metrics import GatewayMetrics
from gateway.resumable.calls import OwnerCall, OwnerCalls
from gateway.resumable.follower import Follower
from gateway.resumable.live import LiveStream
from gateway.resumable.log import ERRORS, Stored, StreamLog, answering, no_longer_kept, not_found
from gateway.resumable.orphans import Orphans
from gateway.resumable.owner import StreamLimits, StreamOwner
from gateway.resumable.record import KeyRecord, StreamForm, StreamHead, digest_of, encode_requests
from shared.background_tasks import BackgroundTasks
from shared.bounds import RESPONSE_ID
from shared.direct_client import DirectClient

CLAIM_S = 3.0
"""A stream with an idempotency key must store its head within this time; otherwise it ends with a 503."""
# After that, another one may be begun: by now, whatever was sent in time has reached NATS.
_CLAIM_LAPSES_S = CLAIM_S + 2.0
_HEAD_POLL_S = 0.05
# How often, and how many times, a head is looked for that NATS may have stored without saying so in time.
_WITHDRAW_EVERY_S = 1.0
_MAX_WITHDRAWALS = 30


class _Claim(NamedTuple):
    """By which message an idempotency key stands for a stream that is about to begin, and since when."""

    key: IdempotencyKey
    seq: int
    created: float


class StreamHub:
    """Keeps and shows logged generations (`gateway.api.endpoint.GenerationLog`).

    Where the log does not answer, all methods that read or write it raise an `ApiError` 503; for a stream that is not
    there one of 404, and `open` one of 410 for a stream that was too large or whose time is over.
    """

    def __init__(
        self,
        nats: DirectClient,
        dispatcher: Dispatcher,
        starter: GenerationStarter,
        metrics: GatewayMetrics,
        limits: StreamLimits,
    ) -> None:
        """Know no stream; `start` must be called once connected."""
        self._log = StreamLog(nats)
        self._dispatcher = dispatcher
        self._starter = starter
        self._limits = limits
        self._calls = OwnerCalls(nats, self._answer_call)
        self._owner = StreamOwner(
            self._log, dispatcher, metrics, limits, self._disowned, lambda: self._calls.serve(self._owner.writer.name)
        )
        self._streams: dict[tuple[str, str], LiveStream] = {}
        self._followed: set[LiveStream] = set()
        self._tasks = BackgroundTasks()
        self._is_closing = False
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer the calls of other gateways, and look for streams that have none."""
        await self._log.start()
        orphans = Orphans(self._log, self._calls, self._dispatcher.fleet, self._adopt)
        self._looking = self._tasks.spawn(orphans.look_forever(), "look for streams without a gateway")
        await self._calls.serve(self._owner.writer.name)

    def hand_over(self, error: ApiError) -> None:
        """Leave all streams to other gateways; answers here end with an error, and their clients go on there."""
        self._is_closing = True
        if self._looking is not None:
            self._looking.cancel()
        self._tasks.spawn(self._calls.close(), "end of calls about streams")
        self._owner.hand_over(error)
        for stream in list(self._streams.values()):
            stream.abort(error)

    async def close(self) -> None:
        """Stop."""
        if not self._is_closing:
            self.hand_over(shutting_down())
        await self._calls.close()
        await self._owner.close()
        for stream in list(self._followed):
            stream.end()
        await self._tasks.wait()
        await self._log.close()

    def open(self, found: Stored) -> LiveStream:
        """Return the stream of a head that was just read, wherever it is generated; `ApiError` 410.

        Its pieces are read in the turn of a reader (`LiveStream.read_stored`).
        """
        head = found.head
        # Another request may have opened it meanwhile.
        known = self._streams.get((head.tenant, head.id))
        if known is None:
            if head.is_cut or self._is_over(head):
                raise no_longer_kept(head.id, "it is too large" if head.is_cut else "its time is over")
            known = LiveStream(head, head.form.generation(head.model), time.perf_counter())
            known.seq = found.seq
            self._streams[head.tenant, head.id] = known
            known.postpone_reading()
            self._follow(known)
        if known.is_cut:
            raise no_longer_kept(head.id, "it is too large")
        return known

    async def find(self, tenant: str, stream_id: str) -> Stored:
        """Return the head of a stream; `ApiError` 404 or 503."""
        known = self._streams.get((tenant, stream_id))
        if known is not None:
            return Stored(known.head, known.seq)
        return await self._find(tenant, stream_id)

    async def _find(self, tenant: str, stream_id: str) -> Stored:
        with answering():
            found = await self._log.find(tenant, stream_id)
        if found is None:
            raise not_found(stream_id)
        return found

    async def stop(self, head: StreamHead) -> None:
        """End a stream and forget it; `ApiError` 404 or 503."""
        stream = self._streams.get((head.tenant, head.id))
        if stream is not None and stream.is_owned and not stream.ended.done():
            self._owner.stop(stream)
            await stream.ended
            return
        found = await self._find(head.tenant, head.id)
        try:
            await self._stop_elsewhere(found.head, stream)
        except BaseException:
            if stream is not None:
                # It goes on: its readers do not learn that it was stopped.
                stream.is_deleted = False
            raise

    async def _stop_elsewhere(self, head: StreamHead, stream: LiveStream | None) -> None:
        """End a stream that this process does not generate; `stream` if it is followed here."""
        with answering():
            reply = None if head.ended is not None else await self._calls.ask(head, "stop")
            is_stopped = reply is not None and reply.is_known
            if stream is not None:
                # Its pieces may be gone before it is read here how it has ended.
                stream.is_deleted = True
            if head.ended is None and not is_stopped:
                # Its owner is dead, or has just noted its end.
                await self._log.fences.revoke(head.owner)
            if stream is None or not is_stopped:
                # Else its owner does it, when it was read here how the stream has ended.
                await self._log.delete(head)

    async def running(self, principal: Principal, size: ReadSize) -> tuple[list[StreamHead], bool]:
        """Return a key's running streams, oldest first, and whether there are more; count the read in `size`."""
        with answering():
            heads, has_more = await self._log.heads(principal.tenant, size)
        own = [head for head in heads if head.key_id == principal.key_id and head.form.has_ids and head.ended is None]
        return sorted(own, key=lambda head: head.created), has_more

    async def repeated(self, principal: Principal, key: IdempotencyKey) -> LoggedGeneration | None:
        """Return the generation that a key stands for, None if it is new; `ApiError` 422 if its request was another."""
        with answering():
            return (await self._find_key(principal.tenant, key))[0]

    async def _find_key(self, tenant: str, key: IdempotencyKey) -> tuple[LiveStream | None, int]:
        """Return the stream that a key stands for, if it stands for one, and the number of its message."""
        while True:
            found = await self._log.find_key(tenant, key.digest)
            if found is None:
                return None, 0
            record, seq = found
            if record.request_digest != key.request_digest:
                message = (
                    "This 'Idempotency-Key' was used for another request. Send a new key with a new request, and the "
                    "same body with the same key."
                )
                raise ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
            try:
                stored = await self.find(tenant, record.stream_id)
            except ApiError as error:
                if error.status != 404:
                    raise
            else:
                if _is_of(stored.head, key):
                    return None if self._is_over(stored.head) else self.open(stored), seq
            if self._dispatcher.clock.now() - record.created > _CLAIM_LAPSES_S:
                # Its gateway died before it began, or its stream is no longer kept.
                return None, seq
            await asyncio.sleep(_HEAD_POLL_S)

    async def start_logged(
        self, endpoint: str, asked: GenerationStart, stamped: Asked, lease: Lease, key: IdempotencyKey | None
    ) -> Membership:
        """Let a generation begin (`gateway.api.endpoint.GenerationLog`).

        `RepeatedError` if the idempotency key stands for a stream already; `ApiError` 400 for an id in the form of a
        response's, 409 while another request with this key begins, 422 if it was used for another, 429, or 503.
        """
        caller, answer = asked.caller, asked.answer
        _check_name(caller.request_id)
        generation = await self._starter.checked(asked.generation, asked.load, caller.tenant)
        self._owner.check_room(caller.tenant)
        claim = None if key is None else await self._claim(key, caller.tenant, caller.request_id)
        left_s = None if claim is None else claim.created + CLAIM_S - self._dispatcher.clock.now()
        requests = self._starter.requests(generation, caller)
        kept = encode_requests(requests, generation.n)
        head = self._head(asked, stamped, StreamForm.of(generation, endpoint), generation.name, kept, claim)
        stream = LiveStream(head, generation, stamped.head.started)
        stream.requests = kept
        self._owner.begin(stream)
        try:
            with answering():
                async with asyncio.timeout(left_s):
                    self._log.write_at_end_of_turn()
                    sinks = self._owner.sinks(stream)
                    prediction, stream.window = await self._starter.dispatch(generation, caller, sinks, requests)
                    # Ids that no client has chosen are random.
                    is_unused = all(name != REQUEST_ID for name, _ in stamped.exchange.head.headers)
                    seq = await self._log.create(head, kept, is_unused=is_unused)
            if (refusal := stream.refusal) is not None:
                raise refusal
        except BaseException:
            if stream.window is not None:
                self._tasks.spawn(self._withdraw(head), f"withdrawal of stream {head.id}")
                stream.window.cancel()
            self._owner.give_up(stream)
            if claim is not None:
                releasing = self._log.release_key(caller.tenant, claim.key.digest, claim.seq)
                self._tasks.spawn(releasing, "release of an idempotency key")
            raise
        stream.window.promise()
        stream.lease = lease
        self._streams[head.tenant, head.id] = stream
        self._owner.opened(stream, seq)
        await stream.join(answer)
        return Membership(lambda: self.leave(stream, answer), stream.delivered, prediction, is_counted=True)

    async def _withdraw(self, head: StreamHead) -> None:
        """Forget a stream whose client was refused: its head would be listed as running, and could be resumed."""
        for _ in range(_MAX_WITHDRAWALS):
            with contextlib.suppress(*ERRORS):
                if self._is_closing or await self._log.withdraw(head):
                    return
            await asyncio.sleep(_WITHDRAW_EVERY_S)

    def _head(
        self,
        asked: GenerationStart,
        stamped: Asked,
        form: StreamForm,
        model: str,
        requests: list[bytes],
        claim: _Claim | None,
    ) -> StreamHead:
        caller = asked.caller
        return StreamHead(
            id=caller.request_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=model,
            form=form,
            stamp=stamped.stamp,
            fingerprint=stamped.fingerprint,
            owner=self._owner.writer.name,
            num_request_pieces=len(requests),
            created=self._dispatcher.clock.now(),
            requests_digest=digest_of(requests),
            key_digest=None if claim is None else claim.key.digest,
            body_digest=None if claim is None else claim.key.request_digest,
            key_seq=0 if claim is None else claim.seq,
        )

    def leave(self, stream: LoggedGeneration, answer: Answer) -> None:
        """Detach an answer from a stream. A stream without readers goes on for the grace period."""
        assert isinstance(stream, LiveStream)
        stream.leave(answer)
        if stream.has_views:
            return
        if stream.is_owned:
            self._owner.review_grace(stream)
        elif stream in self._followed and not stream.is_held:
            stream.end()
            self._drop(stream)

    async def _claim(self, key: IdempotencyKey, tenant: str, stream_id: str) -> _Claim:
        """Let a key stand for a new stream; `RepeatedError` if it stands for one, `ApiError` 409 while one begins."""
        with answering():
            for _ in range(2):
                other, seq = await self._find_key(tenant, key)
                if other is not None:
                    raise RepeatedError(other)
                record = KeyRecord(stream_id, key.request_digest, self._dispatcher.clock.now())
                if (claimed := await self._log.claim_key(tenant, key.digest, record, seq)) is not None:
                    return _Claim(key, claimed, record.created)
        message = "A request with this 'Idempotency-Key' is just beginning. Try again shortly."
        raise ApiError(409, message, param="Idempotency-Key", code="idempotency_conflict", retry_after_s=1.0)

    def _is_over(self, head: StreamHead) -> bool:
        """Whether a stream ended more than `keep_s` ago, so that it is no longer kept."""
        return head.ended is not None and self._dispatcher.clock.now() > head.ended + self._limits.keep_s

    async def _adopt(self, found: Stored) -> None:
        if self._is_closing:
            return
        stream = self.open(found)
        stream.allow_reading()
        await stream.caught_up.wait()
        if not (stream.is_owned or stream.is_held or stream.has_views):
            # Another gateway was faster.
            stream.end()
            self._drop(stream)

    def _follow(self, stream: LiveStream) -> None:
        self._followed.add(stream)
        self._tasks.spawn(self._follow_to_end(stream), f"follow stream {stream.head.id}")

    async def _follow_to_end(self, stream: LiveStream) -> None:
        try:
            await Follower(self._log, self._calls, self._owner, stream).follow(self._followed)
        finally:
            self._followed.discard(stream)
            if not stream.is_owned:
                stream.end()
                self._drop(stream)

    def _disowned(self, stream: LiveStream) -> None:
        """Follow a stream that another process owns now, if a client reads it here; drop one that has ended."""
        if stream.ended.done() or self._is_closing or not stream.has_views:
            stream.end()
            self._drop(stream)
        else:
            self._follow(stream)

    def _drop(self, stream: LiveStream) -> None:
        key = (stream.head.tenant, stream.head.id)
        if self._streams.get(key) is stream:
            del self._streams[key]

    def _answer_call(self, call: OwnerCall) -> int | None:
        stream = self._streams.get((call.tenant, call.stream_id))
        if stream is None or not stream.is_owned or stream.is_held or stream.ended.done():
            return None
        if call.action == "stop":
            self._owner.stop(stream)
        else:
            self._owner.followed(stream)
        return stream.num_shown


def _is_of(head: StreamHead, key: IdempotencyKey) -> bool:
    """Whether a stream was begun with a key and its body: an `x-request-id` may name one that was begun otherwise."""
    return head.key_digest == key.digest and head.body_digest in (None, key.request_digest)


def _check_name(request_id: str) -> None:
    """Refuse a request's id, which names the stream, if it could name a stored response: `ApiError` 400."""
    if RESPONSE_ID.fullmatch(request_id):
        message = "'x-request-id' has the form of a response's id: send another, or none."
        raise ApiError(400, message, param="x-request-id", code="invalid_value")
