"""Notices gateways that have died: nobody waits for their requests any more."""

from __future__ import annotations

from collections.abc import Iterable

SILENCE_S = 5.0
_SUBJECT_PREFIX = "hr.gateway."
_REPLY_PREFIX = "hr.tok."


class GatewayWatch:
    """When each gateway was last heard. A gateway that was never heard is not judged. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Know no gateway."""
        self._heard_at: dict[str, float] = {}

    def hear(self, subject: str, now: float) -> None:
        """Take note of a heartbeat, by its subject: its last token is also that of the gateway's frames."""
        self._heard_at[subject.removeprefix(_SUBJECT_PREFIX)] = now

    def restart(self, now: float) -> None:
        """Give all gateways time again: it was we who could not hear."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def take_dead(self, replies: Iterable[str], now: float) -> set[str]:
        """Return the reply subjects, of those given, that belong to gateways silent for too long; forget these."""
        dead = {token for token, heard_at in self._heard_at.items() if now - heard_at > SILENCE_S}
        for token in dead:
            del self._heard_at[token]
        return {reply for reply in replies if reply.removeprefix(_REPLY_PREFIX) in dead}
