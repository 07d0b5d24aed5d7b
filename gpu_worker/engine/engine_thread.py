"""Runs the engine in a thread of its own and meets the asyncio side once per step.

Commands come in through an inbox that is emptied between steps, so the engine itself needs no lock. Outcomes go out
through `deliver`, called on the engine thread; the consumer passes them on with `call_soon_threadsafe`. With nothing to
do the thread sleeps in the inbox. It ends by `stop`, once the steps in flight have landed, or when the engine breaks
down, which is reported like any other outcome, with `stats.is_fatal` set and no event: no request is at fault, so
all are left to other workers.

`StepRelay` carries outcomes to the event loop, and makes the engine wait where the loop is first: when more than a few
outcomes lie there, since a slow loop would fall behind without end; and for a moment when answers begin, since the
engine would keep the interpreter, and on a CPU the cores, while somebody waits for a token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from msgspec import Struct

from gpu_worker.core.fleet_service import HeardServices
from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError
from gpu_worker.core.scheduler import DuplicateSequenceError
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine, EngineStats
from shared.errors import HeadraceError
from shared.grammar.checker_process import COMPILE_STACK_BYTES
from shared.messages import Lane
from shared.services import Services

_log = logging.getLogger(__name__)


class EngineStoppedError(HeadraceError):
    """The engine takes no more sequences: it was stopped, or it broke down."""


class StepOutcome(Struct, frozen=True):
    """What one step did.

    Attributes:
        error: What the runner or the engine raised, when something did; its sequences have a `failed` event each.
    """

    step: int
    events: list[SequenceEvent]
    stats: EngineStats
    error: Exception | None = None


class EngineThread:
    """Thread-safe face of the engine.

    Attributes:
        stats: The latest snapshot, taken after each step and each round of commands.
        counts: What all steps did so far.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.stats, self.counts = engine.stats, engine.counts
        self._is_closed = False
        self._stop_at: float | None = None
        self._unfinished: list[Sequence] = []
        self.services: Services = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._deliver: Callable[[StepOutcome], None]

    @property
    def is_alive(self) -> bool:
        """Return whether the engine is running."""
        return self._thread.is_alive()

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._engine.scheduler.num_blank_blocks

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the prefix cache has a block of this digest; it may be evicted in the next step."""
        return self._engine.scheduler.is_cached(digest)

    def start(self, deliver: Callable[[StepOutcome], None]) -> None:
        """Start the thread, which calls `deliver` after each step; that must neither block nor raise."""
        self._deliver = deliver
        # As large as the stacks in which its grammars were compiled.
        before = threading.stack_size(COMPILE_STACK_BYTES)
        self._thread.start()
        threading.stack_size(before)

    def validate(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run; see `Scheduler.validate`."""
        self._engine.scheduler.validate(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. One whose id is still in the engine gets a `failed` event.

        Raises:
            PromptTooLongError: The prompt leaves no room for a generated token.
            BadRequestError: The prompt is empty.
            EngineStoppedError: `stop` was called, or the engine broke down.
        """
        self._engine.scheduler.validate(sequence)
        if self._is_closed:
            raise EngineStoppedError("the engine has stopped and takes no more sequences")
        self._inbox.put(partial(self._add, sequence))
        self._engine.make_way(sequence)

    def abort(self, sequence_id: str) -> None:
        """Drop a sequence before the next step, if it is there; events of the step under way may still name it."""
        self._inbox.put(partial(self._engine.abort, sequence_id))

    def hand_over(self, sequence_id: str, done: Callable[[Sequence], None]) -> None:
        """Drop a sequence that another worker goes on with; `done` is called on the engine's thread (`Engine`)."""
        self._inbox.put(partial(self._engine.hand_over, sequence_id, done))

    def stop(self, drain_s: float = 0.0) -> list[Sequence]:
        """End after the steps in flight, or when all work is done, at most `drain_s` seconds later; wait for the end.

        Returns:
            The sequences that did not finish; they get no event.
        """
        self._is_closed = True
        self._inbox.put(partial(self._begin_stop, time.monotonic() + drain_s))
        if self._thread.ident is not None:
            self._thread.join()
        return self._unfinished

    def exchange_services(self, heard: Mapping[Lane, HeardServices]) -> None:
        """Take in what other workers have served tenants, and renew `services`, before the next step."""
        self._inbox.put(partial(self._exchange_services, heard))

    def call(self, command: Callable[[], object]) -> None:
        """Call something on the engine's thread between two steps. What it raises ends the engine, or interrupts it."""
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while not self._has_ended():
                pass
        except Exception as error:
            self._is_closed = True
            if not (isinstance(error, BrokenRunnerError) and error.is_logged):
                _log.exception("the engine broke down")
            self._engine.give_up()
            self._report([], error)
        else:
            self._end()

    def _has_ended(self) -> bool:
        try:
            while True:
                self._take_commands()
                if self._stop_at is not None and (not self._engine.has_work() or time.monotonic() >= self._stop_at):
                    break
                if self._engine.has_work() and not self._engine.pause_s:
                    self._report_of(self._engine.step)
            while self._engine.num_steps_in_flight:
                self._report_of(self._engine.land)
        except InterruptedRunnerError as interruption:
            self._engine.restart()
            self.stats = self._engine.stats
            interruption.recover()
            return False
        return True

    def _end(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        self._unfinished += self._engine.scheduler.sequences
        for sequence in self._engine.scheduler.sequences:
            self._engine.abort(sequence.id)
        if self._engine.has_work():
            # Sequences that were complete when they came have their last event still to be reported.
            self._report_of(self._engine.step)
        self.stats = self._engine.stats

    def _report_of(self, advance: Callable[[], list[SequenceEvent]]) -> None:
        events = advance()
        error = self._engine.last_error
        if error is not None:
            _log.error("step failed: %s", error, exc_info=error)
            for event in events:
                if event.finish == "failed":
                    names = {"id": event.sequence.id, "request_id": event.sequence.trace}
                    _log.error("sequence failed", extra=names | {"error": event.error})
        self._report(events, error)

    def _report(self, events: list[SequenceEvent], error: Exception | None) -> None:
        self.stats = self._engine.stats
        self._deliver(StepOutcome(self.stats.step, events, self.stats, error))

    def _take_commands(self) -> None:
        if self._inbox.empty() and (self._engine.has_work() or self._stop_at is not None):
            pause_s = self._engine.pause_s
            if not pause_s:
                return
            try:
                self._inbox.get(timeout=pause_s)()
            except Empty:
                return
        else:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        self.stats = self._engine.stats

    def _add(self, sequence: Sequence) -> None:
        if self._stop_at is not None:
            self._unfinished.append(sequence)
            return
        try:
            self._engine.add(sequence)
        except DuplicateSequenceError as error:
            self._report([SequenceEvent(sequence, (), sequence.num_output_tokens, "failed", error=str(error))], error)

    def _exchange_services(self, heard: Mapping[Lane, HeardServices]) -> None:
        self.services = self._engine.scheduler.exchange_services(heard)

    def _begin_stop(self, stop_at: float) -> None:
        self._stop_at = stop_at


MAX_WAITING_OUTCOMES = 4
# The engine goes on after that, so that it can be stopped while the loop is stuck.
_MAX_WAIT_S = 5.0
# Outcomes of more events take the loop so long that the engine would lose more than the answers gain.
MAX_FIRST_EVENTS = 8
# A loop that is not there by then does something else that takes longer.
_MAX_FIRST_WAIT_S = 0.002


@dataclass(eq=False)
class StepRelay:
    """`deliver` is called on the engine's thread, everything else on the loop's."""

    _loop: asyncio.AbstractEventLoop
    _handle: Callable[[StepOutcome], None]
    _send: Callable[[], None]
    _outcomes: deque[StepOutcome] = field(default_factory=deque)
    _has_room: threading.Event = field(default_factory=threading.Event)

    def deliver(self, outcome: StepOutcome) -> None:
        """Pass an outcome on."""
        self._has_room.clear()
        self._outcomes.append(outcome)
        self._loop.call_soon_threadsafe(self._take_all)
        if len(self._outcomes) > MAX_WAITING_OUTCOMES:
            self._has_room.wait(_MAX_WAIT_S)
        elif _begins_answers(outcome):
            self._has_room.wait(_MAX_FIRST_WAIT_S)

    def _take_all(self) -> None:
        while self._outcomes:
            self._handle(self._outcomes.popleft())
        self._send()
        self._has_room.set()


def _begins_answers(outcome: StepOutcome) -> bool:
    """Return whether it has a first token, and little else."""
    events = outcome.events
    return len(events) <= MAX_FIRST_EVENTS and any(
        event.num_tokens_before == 0 and event.token_ids and event.finish is None for event in events
    )
