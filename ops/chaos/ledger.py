"""What the load generator wrote down about each request, and how an entry is judged against an undisturbed run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    """What became of a request.

    `OK`: complete, exactly once, and equal to the undisturbed run. `ABORTED`: this client left on purpose.
    `REFUSED`: not admitted, and told when to return. `UNREACHABLE`: the gateway was dead before it said anything.
    `LOST_WITH_GATEWAY`: its gateway was killed by the scenario. All others are broken promises.
    """

    OK = "ok"
    ABORTED = "aborted"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LOST_WITH_GATEWAY = "lost with its gateway"
    WRONG_TEXT = "wrong text"
    WRONG_ENDS = "ended not exactly once"
    FAILED = "failed"
    BROKEN_OFF = "broken off in silence"
    UNFINISHED = "no end in time"
    REFUSED_BADLY = "refused without Retry-After"


ALLOWED = (Verdict.OK, Verdict.ABORTED, Verdict.REFUSED, Verdict.UNREACHABLE, Verdict.LOST_WITH_GATEWAY)
_REFUSALS = (429, 503)


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as it came: all text, the tokens where log probabilities named them, and every end."""

    text: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """An undisturbed answer. Two requests with the same body must give the same one."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]
    finishes: tuple[str, ...]
    completion_tokens: int | None


@dataclass(slots=True)
class Entry:
    """One request, from its first byte to its end. Times are monotonic seconds.

    Attributes:
        variant: Number of its body in the mix.
        is_stream: Whether its answer comes in pieces, so that its silences say something.
        request_id: What the gateway called it, in `x-request-id`.
        num_done: `[DONE]` marks, or whole bodies.
        first_at, last_at: Of the data that carried output; comments and heads are not output.
        longest_silence: Between sending, pieces of output and the end; in seconds.
        silence_ended_at: When the longest silence ended.
        is_cut: The connection ended before the answer did.
        is_gateway_killed: The scenario had killed its gateway by then.
    """

    variant: int
    gateway: str
    sent_at: float
    is_stream: bool = True
    request_id: str = ""
    status: int | None = None
    retry_after_s: float | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    num_done: int = 0
    error: str = ""
    first_at: float | None = None
    last_at: float | None = None
    ended_at: float | None = None
    longest_silence: float = 0.0
    silence_ended_at: float = 0.0
    is_aborted: bool = False
    is_cut: bool = False
    is_gateway_killed: bool = False

    def note_output(self, now: float) -> None:
        """Take note that output came."""
        if self.first_at is None:
            self.first_at = now
        self._note_silence(now)
        self.last_at = now

    def end(self, now: float) -> None:
        """Take note that nothing more will come."""
        if self.ended_at is None:
            self.ended_at = now
            self._note_silence(now)

    def silent_after_s(self, start: float, end: float) -> float:
        """Return for how long after the end of a span the longest silence lasted; 0 if it was not in that span."""
        began_at = self.silence_ended_at - self.longest_silence
        is_inside = began_at < end and self.silence_ended_at > start
        return max(0.0, self.silence_ended_at - end) if is_inside else 0.0

    def _note_silence(self, now: float) -> None:
        silence_s = now - (self.last_at or self.sent_at)
        if silence_s > self.longest_silence:
            self.longest_silence = silence_s
            self.silence_ended_at = now

    @property
    def answer(self) -> Reference:
        """The received answer, in the form of a reference."""
        choices = [self.choices[index] for index in sorted(self.choices)]
        return Reference(
            tuple("".join(choice.text) for choice in choices),
            tuple(tuple(choice.tokens) for choice in choices),
            tuple(choice.finishes[-1] if choice.finishes else "" for choice in choices),
            self.completion_tokens,
        )

    def judge(self, expected: Reference | None) -> Verdict:
        """Say what became of the request; without a reference any complete answer will do."""
        if self.is_aborted:
            return Verdict.ABORTED
        if self.status in _REFUSALS:
            return Verdict.REFUSED if self.retry_after_s is not None else Verdict.REFUSED_BADLY
        if self.ended_at is None:
            return Verdict.UNFINISHED
        if self.is_cut:
            if self.is_gateway_killed:
                return Verdict.LOST_WITH_GATEWAY
            return Verdict.UNREACHABLE if self.status is None and not self.error else Verdict.BROKEN_OFF
        if self.error or self.status != 200:
            return Verdict.FAILED
        if self.num_done != 1 or any(len(choice.finishes) != 1 for choice in self.choices.values()):
            return Verdict.WRONG_ENDS
        if expected is not None and self.answer != expected:
            return Verdict.WRONG_TEXT
        return Verdict.OK


@dataclass(slots=True)
class Ledger:
    """All entries of one load, and the undisturbed answers by the number of their body."""

    entries: list[Entry] = field(default_factory=list)
    references: dict[int, Reference] = field(default_factory=dict)

    def verdicts(self) -> Counter[Verdict]:
        """Count what became of the requests."""
        return Counter(self.verdict(entry) for entry in self.entries)

    def verdict(self, entry: Entry) -> Verdict:
        """Judge one entry by the reference of its body."""
        return entry.judge(self.references.get(entry.variant))

    def broken(self) -> list[Entry]:
        """Return the entries that no promise allows."""
        return [entry for entry in self.entries if self.verdict(entry) not in ALLOWED]

    def during(self, windows: list[tuple[float, float]], after_s: float = 2.0) -> list[Entry]:
        """Return the admitted streams that were open in one of these spans of time, or within `after_s` after it."""
        return [
            entry
            for entry in self.entries
            if entry.is_stream
            and entry.status == 200
            and entry.ended_at is not None
            and any(entry.sent_at < end + after_s and entry.ended_at > start for start, end in windows)
        ]
