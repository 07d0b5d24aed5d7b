"""Which gateways still send heartbeats: a dead one needs no answers, a frozen one sends its requests again."""

from __future__ import annotations

# With a heartbeat and a check each second, the work of a dead gateway stops within five.
SILENCE_S = 3.5
# After so long, what a gateway had asked for is of no use even if it comes back: its clients have given up.
GIVE_UP_S = 60.0
_FORGET_S = 600.0
_SUBJECT_PREFIX = "hr.gateway."
_REPLY_PREFIX = "hr.tok."


class GatewayWatch:
    """When each gateway was last seen. One that was never seen is not silent. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Know no gateway."""
        self._heard_at: dict[str, float] = {}

    def note_heartbeat(self, subject: str, now: float) -> None:
        """Take note of a heartbeat, by its subject: its last token is also that of the gateway's frames."""
        self._heard_at[subject.removeprefix(_SUBJECT_PREFIX)] = now

    def restart(self, now: float) -> None:
        """Restart the silence of all gateways: this worker was paused or disconnected."""
        self._heard_at = {token: now for token, heard_at in self._heard_at.items() if now - heard_at < _FORGET_S}

    def is_silent(self, reply: str, now: float) -> bool:
        """Say whether the gateway that gets its frames on this subject has been silent for too long."""
        return self._silence_s(reply, now) > SILENCE_S

    def is_given_up(self, reply: str, now: float) -> bool:
        """Say whether it has been silent for so long that nobody can be waiting behind it."""
        return self._silence_s(reply, now) > GIVE_UP_S

    def _silence_s(self, reply: str, now: float) -> float:
        return now - self._heard_at.get(reply.removeprefix(_REPLY_PREFIX), now)
