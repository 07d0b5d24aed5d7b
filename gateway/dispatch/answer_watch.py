"""Whether NATS hears us, on a connection over which it is heard.

A link may pass bytes one way only. Then heartbeats and tokens come in as ever, while nothing that is published arrives,
and requests wait for a claim that cannot come. So NATS is asked for an answer twice a second, and when one is owed for
long although other things come in, what we say is taken to be lost, until the answer is there.

A link that is too narrow for what comes in delays answers as much: whoever asked now would wait as long for a token.
What is awaited over it is late, too, and not lost: moved all the same, it would only be said once more over this link.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from shared.direct_client import DirectClient

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Times in seconds.

    Attributes:
        interval_s: From an answer to the next question.
        late_s: Wait for an answer after which nothing that is awaited counts as lost.
        lost_s: Wait for an answer after which nothing that is said is heard.
    """

    interval_s: float = 0.5
    late_s: float = 0.5
    lost_s: float = 2.0


class AnswerWatch:
    """Owns the one question that is open.

    Attributes:
        is_lost: What is published is probably not heard.
    """

    def __init__(self, nats: DirectClient, limits: AnswerLimits | None = None) -> None:
        """Watch a connection; nothing is noticed unless `review` is called several times in `interval_s`."""
        self._nats = nats
        self._limits = limits or AnswerLimits()
        self._answer: asyncio.Future[bool] | None = None
        # Since the question, or since the last answer.
        self._waited_s = 0.0
        self.is_lost = False

    @property
    def is_owed(self) -> bool:
        """Whether an answer has been owed for a round or more."""
        return self._answer is not None and not self._answer.done() and self._waited_s > 0

    @property
    def is_late(self) -> bool:
        """Whether an answer has been owed for long."""
        return self.is_owed and self._waited_s >= self._limits.late_s

    async def ask(self) -> None:
        """Ask NATS for an answer, unless it owes one already."""
        if self._answer is None:
            self._answer = await self._nats.ping()
            self._waited_s = 0.0

    async def review(self, round_s: float) -> float:
        """Take note of a round of this process that counts `round_s`, in which NATS is heard.

        Returns:
            How long NATS has owed the answer that has come, if it was late; otherwise 0.
        """
        self._waited_s += round_s
        if self._answer is None:
            if self._waited_s >= self._limits.interval_s:
                await self.ask()
        elif self._answer.done():
            if self.is_lost:
                _logger.warning("NATS hears us again")
            waited_s = self._waited_s
            self.forget_connection()
            return waited_s if waited_s >= self._limits.late_s else 0.0
        elif self._waited_s >= self._limits.lost_s and not self.is_lost:
            self.is_lost = True
            _logger.warning(
                "NATS has owed an answer for %.1f s: new requests are refused until it comes", self._waited_s
            )
        return 0.0

    def forget_pause(self) -> None:
        """Take note that this process was paused: the answer may lie unread."""
        self._waited_s = 0.0

    def forget_connection(self) -> None:
        """Take note that what is open was answered, or will never be: its connection is lost."""
        self._answer = None
        self._waited_s = 0.0
        self.is_lost = False
