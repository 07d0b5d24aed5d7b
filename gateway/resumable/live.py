"""A stream as this process has it: its entries, the answers that show them, and whether this process generates it.

Only logged entries are shown: those from workers wait until the log has confirmed them (`LogWriter`). So a process
that takes the stream over has everything that a client has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from gateway.admission.auth import Principal
from gateway.admission.limits import Lease
from gateway.admission.stored_reads import ReadSize
from gateway.api.answer import Answer, Asked, ResponseHead
from gateway.api.output_reading import naming_field
from gateway.api.sequences import SequenceWindow
from gateway.api.usage import UsageTotals
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.http1.exchange import Exchange
from gateway.resumable.entries import StreamEntries
from gateway.resumable.record import Entry, Failure, PieceWriter, StreamHead
from shared.messages import Delta

# Entries of a long stream that are sent at once: other tasks run in between.
_ENTRIES_AT_ONCE = 256
_PAUSE_S = 0.02

_logger = logging.getLogger(__name__)


class LiveStream(StreamEntries):
    """One stream.

    Attributes:
        head: As it was last read or written; `seq` is the number of its message, 0 before there is one.
        generation: How it is answered.
        pieces: Writes the entries of a stream that this process owns; None for any other.
        window: The sequences of a stream that this process owns.
        lease: Its share of its key's limits, until it has ended.
        started: `time.perf_counter()` when its request arrived here, or when it was taken over.
        ended: Resolves when nothing follows.
        requests: Its encoded requests, while this process owns it.
        caught_up: Set once all entries are read that the log had at the first read.
        is_held: Another process may own it: written entries are not shown yet.
        usage: Tokens of the sequences that have ended.
        failure: How it failed, if it did.
        is_noted: The next round of its writer takes its new entries; only the writer sets it.
        is_followed: Another process reads its pieces while it grows.
        is_ending: One of its sequences has ended, or all have failed, and its pieces lack that entry.
        has_ends: False while no entry ends a sequence.
        is_deleted: A client has stopped it: its owner deletes it once it has ended.
        is_cut: Its log became too large: later entries are shown but not logged.
        num_read_bytes: Size of the pieces that were read from the log.
        is_read: Set once its pieces were read from the log, if they had to be.
    """

    __slots__ = (
        "__weakref__",
        "_dropped",
        "_is_due",
        "_may_read",
        "_num_joining",
        "_num_unfinished",
        "_views",
        "caught_up",
        "ended",
        "failure",
        "generation",
        "has_ends",
        "head",
        "is_cut",
        "is_deleted",
        "is_ending",
        "is_followed",
        "is_held",
        "is_noted",
        "is_read",
        "lease",
        "num_read_bytes",
        "pieces",
        "requests",
        "seq",
        "started",
        "usage",
        "window",
    )

    def __init__(self, head: StreamHead, generation: Generation, started: float) -> None:
        super().__init__()
        self.head = head
        self.seq = 0
        self.generation = generation
        self.num_read_bytes = 0
        self.pieces: PieceWriter | None = None
        self.window: SequenceWindow | None = None
        self.lease: Lease | None = None
        self.started = started
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests: list[bytes] = []
        self.caught_up = asyncio.Event()
        self.is_read = asyncio.Event()
        # Cleared while its follower waits for a reader's turn: `_is_due` is set when it waits, `_may_read` in the turn.
        self._is_due, self._may_read = asyncio.Event(), asyncio.Event()
        self.allow_reading()
        self.is_deleted = self.is_cut = self.is_held = self.is_followed = self.is_ending = self.is_noted = False
        self.has_ends = True
        self.usage = UsageTotals(generation.n)
        # Of entries that were dropped: prompt tokens by sequence, and the number of generated ones.
        self._dropped: tuple[dict[int, int], int] = ({}, 0)
        self._views: list[Answer] = []
        self._num_joining = 0
        self._num_unfinished = generation.num_sequences
        self.failure: ApiError | None = None

    @property
    def request_id(self) -> str:
        """The `x-request-id` of its first answer."""
        return self.head.id

    def asked(self, exchange: Exchange, head: ResponseHead, principal: Principal) -> Asked:
        """Return the parts of an answer to it."""
        return Asked(exchange, self.generation, head, principal, self.head.fingerprint, self.head.stamp)

    @property
    def is_owned(self) -> bool:
        """Whether this process generates it."""
        return self.pieces is not None

    @property
    def refusal(self) -> ApiError | None:
        """The error with which it has failed before there was any output, if it has."""
        failure = self.entries[0][2] if self.entries else None
        return None if failure is None else failure.error()

    @property
    def has_views(self) -> bool:
        """Whether a client reads it from this process."""
        return bool(self._views) or self._num_joining > 0

    @property
    def is_complete(self) -> bool:
        """Whether all that is shown ends the answer well."""
        return self._num_unfinished == 0

    def deltas(self) -> list[list[Delta]]:
        """Return the deltas of each sequence so far."""
        found: list[list[Delta]] = [[] for _ in range(self.generation.num_sequences)]
        for index, delta, _ in self.entries:
            if delta is not None:
                found[index].append(delta)
        return found

    def delivered(self) -> tuple[int, int]:
        """Return prompt and generated tokens so far, each prompt counted once."""
        prompts, num_generated = self._counted()
        return sum(prompts.values()), num_generated

    def _counted(self) -> tuple[dict[int, int], int]:
        dropped, num_generated = self._dropped
        # Each attempt tells the size of its prompt.
        prompts = dict(dropped)
        for index, delta, _ in self.entries[: self.num_shown]:
            if delta is not None:
                num_generated += len(delta.token_ids)
                if delta.prompt_tokens is not None and index % self.generation.n == 0:
                    prompts[index] = delta.prompt_tokens
        return prompts, num_generated

    def show(self, up_to: int, array: bytes | None = None) -> None:
        """Show the entries before number `up_to`, which the log has; `array` has the new ones encoded."""
        if self.ended.done():
            return
        new = self._take(up_to, array, packs=self.pieces is not None)
        for answer in self._views:
            _tell(answer, new)
        if self.has_ends:
            self._note_ends(new)

    def _note_ends(self, new: list[Entry]) -> None:
        for index, delta, failure in new:
            if failure is not None:
                self.failure = failure.error()
            elif delta is not None and delta.finish is not None:
                self._num_unfinished -= 1
                self.usage.add(index, delta.finish.usage)
        if self.failure is not None or self.is_complete:
            self.end()

    def show_unkept(self) -> None:
        """Send all entries to the reader and drop them: they are never sent again."""
        self.show(len(self.entries))
        self._dropped = self._counted()
        self._drop_all()

    def end(self) -> None:
        """Note that nothing follows."""
        self.caught_up.set()
        self.is_read.set()
        self.allow_reading()
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self, error: ApiError) -> None:
        """End it here with an error that the log does not have."""
        self.failure = self.failure or error
        self.cut_views(error)
        self.end()

    def postpone_reading(self) -> None:
        """Read nothing from the log before a reader has its turn."""
        self._is_due.clear()
        self._may_read.clear()

    def allow_reading(self) -> None:
        """Read from the log without the turn of a reader."""
        self._is_due.set()
        self._may_read.set()

    async def wait_for_turn(self) -> bool:
        """Wait until the log may be read; False if the stream has ended meanwhile."""
        self._is_due.set()
        await self._may_read.wait()
        return not self.ended.done()

    async def read_stored(self, turn: AbstractAsyncContextManager[ReadSize]) -> None:
        """Take a reader's turn, and let the pieces be read in it that this process does not have.

        The turn begins when the owner has answered or is known to be dead. Pieces count for the reader who lets them be
        read.

        Raises:
            ApiError: 429; the key has read enough for now.
        """
        await self._is_due.wait()
        async with turn as size:
            if self._may_read.is_set():
                return
            self._may_read.set()
            try:
                await self.is_read.wait()
            finally:
                size.num_bytes = self.num_read_bytes

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the stream for a reader that has not joined yet."""
        self._num_joining += 1
        try:
            yield
        finally:
            self._num_joining -= 1

    async def join(self, answer: Answer) -> None:
        """Send an answer all entries so far, and from then on those that are shown.

        Raises:
            ApiError: Its client wants an event that does not exist yet; or the stream could not be read.
        """
        with self.kept():
            await self.caught_up.wait()
            if self.failure is not None and not self.num_shown:
                raise self.failure
            answer.open()
            position = 0
            while position < self.num_shown and not answer.done.done():
                stop = min(position + _ENTRIES_AT_ONCE, self.num_shown)
                _tell(answer, self.entries[position:stop])
                position = stop
                await asyncio.sleep(_PAUSE_S if answer.is_paused else 0)
            answer.check_position()
            if self.ended.done() and not answer.done.done():
                # It ended without an entry that says so.
                broken = ApiError(500, "The stream ended without an end.", code="internal_error")
                answer.break_off(self.failure or broken)
            elif not answer.done.done():
                self._views.append(answer)

    def leave(self, answer: Answer) -> None:
        """Tell an answer nothing more."""
        self._views = [each for each in self._views if each is not answer]

    def cut_views(self, error: ApiError) -> None:
        """End the answers of this process with an error; the stream goes on elsewhere."""
        for answer in list(self._views):
            answer.break_off(error)

    def disown(self) -> None:
        """Give the stream up to another process: unconfirmed entries were never shown."""
        del self.entries[self.num_shown :]
        self.window = self.pieces = None
        self.requests = []
        self.is_held = False
        self.has_ends = True

    @property
    def has_last_entry(self) -> bool:
        """Whether the entries, shown or not, hold the end."""
        num_finished = sum(delta is not None and delta.finish is not None for _, delta, _ in self.entries)
        is_failed = bool(self.entries) and self.entries[-1][2] is not None
        return is_failed or num_finished == self.generation.num_sequences


class LoggedSink:
    """The sink of one sequence of a stream that this process generates."""

    __slots__ = ("_index", "_on_entry", "_stream")

    def __init__(self, stream: LiveStream, index: int, on_entry: Callable[[LiveStream], None]) -> None:
        self._stream = stream
        self._index = index
        self._on_entry = on_entry

    def deliver(self, delta: Delta) -> None:
        """Keep a piece. This runs once per token and stream."""
        stream = self._stream
        stream._recent.append((self._index, delta, None))
        if delta.finish is not None:
            stream.is_ending = stream.has_ends = True
        if not stream.is_noted:
            self._on_entry(stream)

    def fail(self, error: ApiError) -> None:
        """Keep that the generation has failed."""
        fail(self._stream, error)
        self._on_entry(self._stream)


def fail(stream: LiveStream, error: ApiError) -> None:
    """End the generation of a stream with an error, which becomes its last entry."""
    if stream.window is not None:
        stream.window.cancel()
    if not stream.entries or stream.entries[-1][2] is None:
        error = naming_field(error, stream.head.form.grammar_field)
        stream.entries.append((-1, None, Failure.of(error)))
        stream.is_ending = stream.has_ends = True


def unfinished(deltas: Sequence[Sequence[Delta]]) -> list[int]:
    """Return the numbers of the sequences that have not ended."""
    return [index for index, each in enumerate(deltas) if not each or each[-1].finish is None]


def _tell(answer: Answer, entries: list[Entry]) -> None:
    """Tell an answer entries. This runs once per round and stream."""
    sinks = answer.sinks
    try:
        for index, delta, failure in entries:
            if delta is not None:
                sinks[index].deliver(delta)
            elif failure is not None:
                answer.fail(failure.error())
    except Exception:
        # Other answers are to have them all the same.
        _logger.exception("entries of a stream could not be told")
        answer.break_off(ApiError(500, "The answer could not be delivered.", code="internal_error"))
