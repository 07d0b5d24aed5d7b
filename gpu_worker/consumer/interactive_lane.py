"""Interactive requests: from the interactive queue to frames, with the epoch as the fence.

A message is acknowledged when nothing more will be said about its request here; until then the queue delivers it again
if this worker dies. A request that is suspected of killing workers begins only when everything else has produced a
token, and nothing new begins beside it, so that its gateway knows which request killed the worker.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import msgspec

from gpu_worker.consumer.answer import announcement, claim, ending
from gpu_worker.consumer.gateway_watch import Cancellations, GatewayWatch
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, log_fields
from gpu_worker.consumer.intake import Intake
from gpu_worker.consumer.outbox import Outbox
from gpu_worker.consumer.prefixes.affinity import PrefixAffinity
from gpu_worker.consumer.queued_message import (
    ACK,
    REDELIVER,
    REDELIVER_LATER,
    REDELIVER_SOON,
    QueuedMessage,
    UnreadableRequestError,
    read_request,
)
from gpu_worker.consumer.request_observer import ReceiptWriter
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.engine.engine_thread import EngineThread
from shared.disaggregation import KvReady
from shared.errors import BadRequestError
from shared.log_limit import LogLimit
from shared.messages import Cancel, Delta, Finish, Request
from shared.nats_connection import SEND_ERRORS
from shared.server_clock import ServerClock

_log = logging.getLogger(__name__)

# After a suspect was refused nothing new begins for so long: several of its redeliveries (`REDELIVER_SOON`).
RESERVED_S = 0.5

# A gateway moves a stream of which it hears nothing for ten seconds.
WAITING_INTERVAL_S = 2.0

# A request that is prepared for longer is announced then: an idle worker's gateway expects a claim within a second.
ANNOUNCED_AFTER_S = 0.25

# Frames go to gateways and nowhere else, whatever a request asks for.
_FRAME_SUBJECT = re.compile(r"hr\.tok\.[A-Za-z0-9_-]+")


class InteractiveLane:
    """Takes, cancels, hands over and ends interactive requests."""

    def __init__(
        self,
        intake: Intake,
        engine: EngineThread,
        held: HeldRequests,
        open_outbox: Callable[[InteractiveLane], Outbox],
        make_way: Callable[[], None],
        clock: ServerClock | None = None,
        affinity: PrefixAffinity | None = None,
        receipts: ReceiptWriter | None = None,
    ) -> None:
        """Serve over an outbox that reports to this lane; deadlines are times of `clock`.

        `make_way` is called when a suspect is to begin: it gives back batch requests that have produced nothing yet.
        `receipts` are sent with the ends.
        """
        self._clock = clock or ServerClock()
        self._log_limit = LogLimit(_log)
        self._intake = intake
        self._engine = engine
        self._held = held
        self._make_way = make_way
        self._affinity = affinity
        self._receipts = receipts or ReceiptWriter()
        self._cancellations = Cancellations()
        self._step_before = -1
        self.gateways = GatewayWatch()
        self.outbox = open_outbox(self)

    def take(self, message: QueuedMessage, *, may_wait: bool = True) -> bool:
        """Take a message from the queue; return whether it was given back at once, because it may not begin yet.

        If it `may_wait`, it does where another worker holds its prefix, which takes it then.
        """
        if self._held.is_withdrawn:
            self.outbox.answer(message, REDELIVER)
            return True
        try:
            request = read_request(message.data)
        except UnreadableRequestError as error:
            self._refuse_unreadable(message, error)
            return False
        if request.reply is None or not _FRAME_SUBJECT.fullmatch(request.reply):
            _log.warning("request without a gateway's reply subject", extra=log_fields(request))
            self.outbox.answer(message)
            return False
        if self._is_useless(request, request.reply, message) or self._is_known(request, message):
            return False
        if not self._may_begin(request) or self._intake.leaves_to_others(request):
            self.outbox.answer(message, REDELIVER_SOON)
            return True
        chain = None if self._affinity is None else self._affinity.chain(request)
        if may_wait and self._affinity is not None and self._affinity.waits(message, request, chain):
            return False
        request = msgspec.structs.replace(request, lane="interactive")
        held = HeldRequest(request.id, request, message, probation=request.probation, chain=chain)
        self._held.add(held)
        if held.probation:
            self._held.suspect, self._held.reserved_until = held, 0.0
        self._intake.begin(held, self)
        if held.sequence is None and not held.probation:
            asyncio.get_running_loop().call_later(ANNOUNCED_AFTER_S, self._announce_preparation, held)
        return False

    def cancel(self, cancel: Cancel) -> None:
        """Stop requests, here or still to come; a cancellation with a tenant is of that tenant's jobs."""
        if cancel.tenant is not None:
            return
        now = time.monotonic()
        for request_id in cancel.ids:
            self._cancellations.add(request_id, cancel.epoch, now)
            held = self._held.get(request_id)
            if held is not None and (cancel.epoch is None or held.request.epoch <= cancel.epoch):
                self.drop(held)

    def drop(self, held: HeldRequest) -> None:
        """Stop working on a cancelled or replaced request, and report its cost to its gateway."""
        if held.sequence is not None and held.sequence.scheduled_at is not None:
            self._put(held, self._ending(held, Finish("cancelled")))
        self._remove(held)
        self.outbox.answer(held.message)

    def _announce_preparation(self, held: HeldRequest) -> None:
        """Announce a request that the engine does not have yet.

        Its prompt is encoded, its grammar compiled, its images decoded or its adapter loaded; or one of these waits.
        """
        if held.sequence is None and self._held.is_current(held):
            self._put(held, announcement(held))

    async def tell_of_waiting(self) -> None:
        """Announce requests that had no output since the last call, so that their gateways do not move them.

        They wait for their turn; a preempted sequence waits until others have ended. While the engine makes no steps,
        nothing is announced.
        """
        step = self._engine.stats.step
        is_moving, self._step_before = step != self._step_before, step
        for held in self._held:
            if held.request.lane != "interactive":
                continue
            if held.sequence is None:
                self._announce_preparation(held)
                continue
            if is_moving and held.num_output_tokens == held.num_tokens_before:
                self._put(held, announcement(held))
            held.num_tokens_before = held.num_output_tokens

    def drop_for_silent_gateways(self, now: float) -> None:
        """Stop working on the requests of gateways that are silent. `now` is monotonic seconds.

        A gateway that was only paused finds the handovers when it goes on, and the queue keeps the requests until then.
        """
        self.gateways.review(now)
        for held in self._held:
            reply = held.request.reply
            if held.request.lane != "interactive" or reply is None or not self.gateways.is_silent(reply):
                continue
            _log.warning("dropped request of a silent gateway", extra=log_fields(held.request))
            self._put(held, self._ending(held, Finish("handoff")))
            self._remove(held)
            self.outbox.answer(held.message, REDELIVER_LATER)

    def report_unsent(self, deltas: list[Delta]) -> None:
        """Leave requests to the queue whose deltas could not be sent: the gateway misses something now."""
        for delta in deltas:
            held = self._attempt_of(delta)
            if held is not None:
                self.abandon(held)

    def report_too_large(self, delta: Delta) -> None:
        """End a request whose delta no frame can hold; only data about a prompt can be that large."""
        held = self._attempt_of(delta)
        if held is not None:
            held.num_output_tokens = delta.seq
            param = "prompt_logprobs" if delta.prompt_logprobs else "echo"
            self.fail(held, "The answer for the prompt is too large for one message; ask for less.", param)

    def abandon(self, held: HeldRequest) -> None:
        """Stop working on a request without acknowledging it: the queue delivers it again, after a while."""
        # A claim that is sent now would make the gateway refuse the worker that gets the request next.
        if held.request.reply is not None:
            self.outbox.withdraw(held.request.reply, held.request.id, held.request.epoch)
        self._remove(held)

    async def announce(self, held: HeldRequest) -> bool:
        """Claim a request on probation before anything is done with it: if it kills this worker, its gateway knows."""
        assert held.request.reply is not None
        self._put(held, announcement(held))
        try:
            await self.outbox.deliver(held.request.reply)
        except SEND_ERRORS as error:
            _log.warning("request on probation not announced", extra=log_fields(held.request) | {"error": repr(error)})
            if not self._held.is_current(held):
                return False
            if self.outbox.withdraw(held.request.reply, held.request.id, held.request.epoch):
                self.abandon(held)
            else:
                # The claim is on its way and may still arrive; what `give_back` sends arrives after it.
                self.give_back(held)
            return False
        return True

    def admitted(self, held: HeldRequest) -> None:
        """Claim a request that the engine has, and report its number of prompt tokens."""
        assert held.sequence is not None
        self._put(held, claim(held, held.sequence.num_prompt_tokens))

    def refuse(self, held: HeldRequest, error: BadRequestError) -> None:
        """End a request that can never run."""
        self.end(held, Finish("failed", error=str(error), error_param=error.param or "prompt", error_code=error.code))

    def fail(self, held: HeldRequest, error: str, param: str | None = None) -> None:
        """End a request that failed here; `param` names its field that is at fault, if one is."""
        self.end(held, Finish("failed", error=error, error_param=param))

    def give_back(self, held: HeldRequest) -> None:
        """Let another worker do it: the gateway dispatches it again at once."""
        self.end(held, Finish("handoff"))

    def unavailable(self, held: HeldRequest, error: str, code: str) -> None:
        """End a request whose adapter or images are unavailable, with a 503 and Retry-After."""
        self.end(held, Finish("failed", error=error, error_code=code))

    def hand_over(self, held: HeldRequest, ready: KvReady) -> None:
        """Let a decode worker continue: the gateway dispatches the request again, with the place of its KV."""
        self.end(held, Finish("handoff", ready=ready))

    def end(self, held: HeldRequest, finish: Finish) -> None:
        """End a request with a delta that has no tokens."""
        self._put(held, self._ending(held, finish), held.message)
        self._remove(held)

    def _ending(self, held: HeldRequest, finish: Finish) -> Delta:
        receipt = self._receipts.receipt(held, held.num_output_tokens)
        return ending(held, msgspec.structs.replace(finish, receipt=receipt))

    def give_back_waiting(self) -> None:
        """Give back requests that have not started to run."""
        for held in self._held:
            if held.request.lane == "interactive" and held.is_waiting:
                self.give_back(held)

    def advance(self, held: HeldRequest, delta: Delta) -> None:
        """Send the result of a step for a request."""
        if held is self._held.suspect:
            held.probation -= len(delta.token_ids)
            if held.probation <= 0:
                self._held.suspect = None
        if delta.finish is None:
            self._put(held, delta)
            held.num_output_tokens = delta.seq + len(delta.token_ids)
        else:
            self._put(held, delta, held.message)
            self._remove(held)

    def _put(self, held: HeldRequest, delta: Delta, finished: QueuedMessage | None = None) -> None:
        assert held.request.reply is not None
        self.outbox.put(held.request.reply, delta, finished)

    def _attempt_of(self, delta: Delta) -> HeldRequest | None:
        held = self._held.get(delta.id)
        return held if held is not None and held.request.epoch == delta.epoch else None

    def _remove(self, held: HeldRequest) -> None:
        """Let go of a request, and make the engine do so too if it has not finished it."""
        self._held.remove(held)
        if held.sequence is not None and held.sequence.status is not SequenceStatus.FINISHED:
            self._engine.abort(held.sequence.id)

    def _may_begin(self, request: Request) -> bool:
        """Whether a request may begin now; if not, the queue delivers it again, here or elsewhere."""
        if not request.probation:
            # A stream with progress has to go on, and is less dangerous than a request that has never run.
            return bool(request.emitted) or not self._held.has_suspect
        if self._held.suspect is not None:
            return False
        is_alone = not any(held.is_untried for held in self._held)
        # Beside people a batch prompt may take minutes, in which no new request would begin here.
        self._make_way()
        if is_alone:
            return True
        # Otherwise a steady flow of new requests would delay it for ever.
        self._held.reserved_until = time.monotonic() + RESERVED_S
        return False

    def _is_useless(self, request: Request, reply: str, message: QueuedMessage) -> bool:
        """Return whether an attempt is cancelled, expired, or of a silent gateway; if so, answer its message."""
        if self._cancellations.covers(request.id, request.epoch, time.monotonic()):
            self.outbox.answer(message)
            return True
        if self.gateways.is_silent(reply):
            self.outbox.answer(message, ACK if self.gateways.is_given_up(reply) else REDELIVER_LATER)
            return True
        if request.deadline is None or request.deadline > self._clock.now():
            return False
        delta = Delta(request.id, request.epoch, len(request.emitted), finish=Finish("expired"))
        self.outbox.put(reply, delta, message)
        return True

    def _is_known(self, request: Request, message: QueuedMessage) -> bool:
        """Return whether this or a newer attempt is held already; an older one makes way."""
        current = self._held.get(request.id)
        if current is None:
            return False
        if request.epoch > current.request.epoch:
            self.drop(current)
            return False
        if message.stream_seq == current.message.stream_seq:
            # Redelivered because we were slow to say that it is in progress: the last delivery is the one to answer.
            current.message = message
        else:
            self.outbox.answer(message)
        return True

    def _refuse_unreadable(self, message: QueuedMessage, error: UnreadableRequestError) -> None:
        envelope = error.envelope
        if envelope is None or envelope.reply is None or not _FRAME_SUBJECT.fullmatch(envelope.reply):
            self._log_limit.warning(message.subject, "message is not a request", extra={"error": str(error)})
            self.outbox.answer(message)
            return
        finish = Finish("failed", error=str(error), error_param=error.param)
        self.outbox.put(envelope.reply, Delta(envelope.id, envelope.epoch, 0, finish=finish), message)
