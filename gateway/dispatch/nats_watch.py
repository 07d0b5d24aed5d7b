"""Whether NATS answers on an open connection: the client itself closes a dead one only after four to six seconds.

When nothing has come in for a moment, NATS gets a PING. When its PONG is missing for long, NATS is *suspected* of being
away until anything comes in. It is suspected too when messages come in but no PONG: a link may pass bytes in one
direction only, and then nothing that is published arrives. A link that is too slow for the incoming messages delays the
PONG as much as tokens: whatever is awaited over it is late and not lost.

Silence is counted in rounds of this process, each bounded: a process that was starved or stopped does not take its own
absence for that of NATS. After a false alarm the next one takes twice the silence.
"""

from __future__ import annotations

import asyncio
import logging

from shared.direct_client import DirectClient
from shared.nats_connection import is_clustered

# From a PONG to the next PING.
INTERVAL_S = 0.5
# Waits for a PONG after which whatever else is awaited counts as late, and publications as lost.
ANSWER_LATE_S = 0.5
ANSWER_LOST_S = 2.0
# Silence after which NATS gets a PING; a live worker sends something more often than that.
PING_AFTER_S = 0.25
# Waits for the PONG after which NATS counts as silent, and not the workers, and after which it is suspected. The latter
# grows while alarms are false; the client closes the connection after 6 s.
LATE_S = 0.15
SUSPECT_S = 0.7
MAX_SUSPECT_S = 3.0
# Time without an alarm after which `SUSPECT_S` holds again.
CALM_S = 60.0
# A round counts for this much at most, however late it is.
_LONGEST_ROUND_S = 0.1

_logger = logging.getLogger(__name__)


class AnswerWatch:
    """Asks NATS twice a second for a PONG. `is_lost`: publications probably do not arrive."""

    def __init__(self, nats: DirectClient) -> None:
        """Watch a connection; nothing is noticed unless `review` is called several times in `INTERVAL_S`."""
        self._nats = nats
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
        return self.is_owed and self._waited_s >= ANSWER_LATE_S

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
            if self._waited_s >= INTERVAL_S:
                await self.ask()
        elif self._answer.done():
            if self.is_lost:
                _logger.warning("NATS receives publications again")
            waited_s = self._waited_s
            self.forget_connection()
            return waited_s if waited_s >= ANSWER_LATE_S else 0.0
        elif self._waited_s >= ANSWER_LOST_S and not self.is_lost:
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


class NatsWatch:
    """Knows about the silence of one connection."""

    def __init__(self, nats: DirectClient) -> None:
        """Watch a connection; nothing is noticed unless `review` is called several times in `PING_AFTER_S`."""
        self._nats = nats
        self._num_reads = nats.num_reads
        self._reviewed_at: float | None = None
        self._silent_s = 0.0
        self._unanswered_s: float | None = None
        self._suspect_after_s = SUSPECT_S
        self._alarmed_at = 0.0
        self._is_silent = False
        self._answers = AnswerWatch(nats)

    @property
    def is_suspected(self) -> bool:
        """Whether NATS is probably away: it has been silent for long, or publications do not arrive."""
        return self._is_silent or self._answers.is_lost

    @property
    def is_connected(self) -> bool:
        """Whether NATS can be reached, as far as is known."""
        return self._nats.is_connected and not self.is_suspected

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused: they would wait for an unknown time.

        In a cluster they are not: the client finds another server.
        """
        return self.is_suspected and not is_clustered(self._nats)

    @property
    def is_late(self) -> bool:
        """Whether NATS is silent or answers late, so that messages of workers may be late or lost."""
        return self._answers.is_late or (self._unanswered_s is not None and self._unanswered_s > 0)

    @property
    def owes_answer(self) -> bool:
        """Whether recent publications may not have arrived: a PONG is missing, whatever else comes in."""
        return self.is_late or self._answers.is_owed

    async def ask(self) -> None:
        """Send a PING, unless a PONG is awaited already."""
        if self._unanswered_s is None and self._nats.is_connected:
            self._unanswered_s = 0.0
            await self._answers.ask()

    async def review(self, now: float) -> float:
        """Take note of a round at loop time `now`.

        Returns:
            How long NATS has been silent, or a PONG was missing, if it has come late; otherwise 0.
        """
        round_s = 0.0 if self._reviewed_at is None else min(now - self._reviewed_at, _LONGEST_ROUND_S)
        self._reviewed_at = now
        if not self._nats.is_connected:
            self.forget()
            return 0.0
        # Complete silence is handled below.
        owed_s = await self._answers.review(round_s if self._silent_s < PING_AFTER_S else 0.0)
        if self._nats.num_reads != self._num_reads:
            return max(owed_s, self._note_input(now))
        self._silent_s += round_s
        if self._unanswered_s is None:
            if self._silent_s >= PING_AFTER_S:
                await self.ask()
            return 0.0
        self._unanswered_s += round_s
        if not self._is_silent and self._unanswered_s >= self._suspect_after_s:
            self._suspect(now)
        return 0.0

    def forget(self) -> None:
        """Take note that this process was paused: silence proves nothing."""
        self._num_reads = self._nats.num_reads
        self._silent_s = 0.0
        self._unanswered_s = None
        self._answers.forget_pause()

    def disconnected(self) -> None:
        """Take note that the connection is lost. The suspicion was right, so the first limit holds again."""
        self.forget()
        self._answers.forget_connection()
        self._is_silent = False
        self._suspect_after_s = SUSPECT_S

    def _suspect(self, now: float) -> None:
        _logger.warning("NATS has been silent for %.1f s: new requests are refused until it answers", self._silent_s)
        self._is_silent = True
        self._suspect_after_s = min(MAX_SUSPECT_S, 2 * self._suspect_after_s)
        self._alarmed_at = now

    def _note_input(self, now: float) -> float:
        silent_s = self._silent_s
        was_late = self._unanswered_s is not None and self._unanswered_s >= LATE_S
        self._num_reads = self._nats.num_reads
        self._silent_s = 0.0
        self._unanswered_s = None
        if self._is_silent:
            _logger.warning("NATS answers again")
            self._is_silent = False
        elif now - self._alarmed_at > CALM_S:
            self._suspect_after_s = SUSPECT_S
        return silent_s if was_late else 0.0
