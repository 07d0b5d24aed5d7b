"""Whether what this gateway publishes reaches NATS, on a connection over which messages still come in.

A link may pass bytes in one direction only. Then heartbeats and tokens come in as usual, and nothing that is published
arrives: requests wait for a claim that cannot come. So NATS gets a PING twice a second. When its PONG has been missing
for long although other messages come in, publications are taken to be lost until the PONG is there.

A link that is too slow for what comes in delays the PONG as much as tokens. What is awaited over it is late and not
lost: to move a request would only send the same again over this link.
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
        interval_s: From a PONG to the next PING.
        late_s: Wait for a PONG after which whatever else is awaited counts as late, and not as lost.
        lost_s: Wait for a PONG after which publications count as lost.
    """

    interval_s: float = 0.5
    late_s: float = 0.5
    lost_s: float = 2.0


class AnswerWatch:
    """Owns the one PING whose PONG is awaited.

    Attributes:
        is_lost: Publications probably do not arrive.
    """

    def __init__(self, nats: DirectClient, limits: AnswerLimits | None = None) -> None:
        """Watch a connection; nothing is noticed unless `review` is called several times in `interval_s`."""
        self._nats = nats
        self._limits = limits or AnswerLimits()
        self._answer: asyncio.Future[bool] | None = None
        # Since the PING, or since the last PONG.
        self._waited_s = 0.0
        self.is_lost = False

    @property
    def is_owed(self) -> bool:
        """Whether the PONG has been missing for a round or more."""
        return self._answer is not None and not self._answer.done() and self._waited_s > 0

    @property
    def is_late(self) -> bool:
        """Whether the PONG has been missing for long."""
        return self.is_owed and self._waited_s >= self._limits.late_s

    async def ask(self) -> None:
        """Send a PING, unless a PONG is awaited already."""
        if self._answer is None:
            self._answer = await self._nats.ping()
            self._waited_s = 0.0

    async def review(self, round_s: float) -> float:
        """Take note of a round of this process, `round_s` long, in which something came in.

        Returns:
            How long the PONG that has come was missing, if it was late; otherwise 0.
        """
        self._waited_s += round_s
        if self._answer is None:
            if self._waited_s >= self._limits.interval_s:
                await self.ask()
        elif self._answer.done():
            if self.is_lost:
                _logger.warning("NATS receives what is published again")
            waited_s = self._waited_s
            self.forget_connection()
            return waited_s if waited_s >= self._limits.late_s else 0.0
        elif self._waited_s >= self._limits.lost_s and not self.is_lost:
            self.is_lost = True
            _logger.warning(
                "NATS has not answered a PING for %.1f s: new requests are refused until it does", self._waited_s
            )
        return 0.0

    def forget_pause(self) -> None:
        """Take note that this process was paused: the PONG may lie unread."""
        self._waited_s = 0.0

    def forget_connection(self) -> None:
        """Await no PONG any more: it has come, or its connection is lost."""
        self._answer = None
        self._waited_s = 0.0
        self.is_lost = False
