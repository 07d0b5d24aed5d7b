"""What became of each request, and the file that keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ops.load_generator.answer import REFUSALS, Reading
from shared.errors import HeadraceError

VERSION = 1


class ReportError(HeadraceError):
    """A file is not a report of the load generator."""


class Record(msgspec.Struct, omit_defaults=True):
    """One request; moments are seconds since the run began.

    Attributes:
        intended_s: When it was due. Latencies count from here, however late it was sent.
        sent_s: When it was sent.
        ttft_s: To the first piece of text; None if there was none.
        gaps_s: Between two pieces of text.
        output_tokens: By the usage; where the server tells none, the pieces of text.
        problem: Why it failed; None if it did not.
        turn: Its place in its conversation.
    """

    intended_s: float
    sent_s: float
    ended_s: float
    status: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = []
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    has_usage: bool = False
    problem: str | None = None
    retry_after_s: int | None = None
    turn: int = 0

    @property
    def is_refused(self) -> bool:
        """Return whether the server said that it has no place, or that a limit is reached."""
        return self.status in REFUSALS

    @property
    def latency_s(self) -> float:
        """Return the time to the end of the answer."""
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Return the time per token after the first; None without two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)

    def meets(self, slo_ms: dict[str, float]) -> bool:
        """Return whether it ended well and within all limits, of which `itl` is one of each gap."""
        if self.problem is not None:
            return False
        itl_s = max(self.gaps_s, default=0.0)
        seen = {"ttft": self.ttft_s, "itl": itl_s, "tpot": self.tpot_s, "e2el": self.latency_s}
        return all((seen[name] or 0.0) * 1e3 <= limit for name, limit in slo_ms.items())


def record_of(reading: Reading, start: float, intended_s: float, turn: int) -> Record:
    """Return the record of an answer in a run that began at `start`."""
    first = reading.texts[0][0] - start - intended_s if reading.texts else None
    has_usage = reading.completion_tokens is not None
    return Record(
        round(intended_s, 6),
        round(reading.sent_at - start, 6),
        round(reading.ended_at - start, 6),
        reading.status,
        None if first is None else round(first, 6),
        [round(gap, 6) for gap in reading.gaps_s],
        reading.prompt_tokens,
        reading.cached_tokens,
        reading.completion_tokens or 0 if has_usage else len(reading.texts),
        has_usage,
        reading.problem,
        reading.retry_after_s,
        turn,
    )


class Report(msgspec.Struct):
    """A run.

    Attributes:
        load: The requested load, by option.
        summary: The printed figures.
        num_unfinished: Requests running, or not yet sent, when the run was stopped.
        is_closed_loop: Requests had no due times: each was sent when a slot was free.
    """

    version: int
    started: str
    url: str
    model: str
    load: dict[str, Any]
    duration_s: float
    num_unfinished: int
    is_closed_loop: bool
    goodput_ms: dict[str, float]
    summary: dict[str, Any]
    requests: list[Record]

    @classmethod
    def load_file(cls, path: Path) -> Report:
        """Read one.

        Raises:
            ReportError: It cannot be read, or is none.
        """
        try:
            report = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ReportError(f"{path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ReportError(f"{path} is not a report of `headrace bench serve --json`: {error}") from None
        if report.version != VERSION:
            raise ReportError(f"{path} is a report of version {report.version}; this program reads {VERSION}")
        return report
