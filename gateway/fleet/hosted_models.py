"""The models that hosts can load, as hosts tell of them: what gateways may admit although no worker serves it yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.hosted_models import HostBeat, HostedModel, HostedState

# Silence in seconds after which a host no longer counts: nothing that it could load is waited for.
HOST_SILENCE_S = 5.0
MAX_HOSTS = 1024
# Of all hosts together: a login that may speak for hosts can make up models.
MAX_MODELS = 1024

_SHOWN = (
    *("name", "path", "state", "on_demand", "num_ready", "num_withheld", "ready_in_s", "need_bytes", "error"),
    *("replace_error", "load_s", "wakes"),
)
# What a request may wait for, the best first.
_COMING: tuple[HostedState, ...] = ("awake", "loading", "asleep", "stopping", "no_room", "failed")


class HostedModels:
    """Owns the view of the hosts. Times are loop times."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[HostBeat, float]] = {}
        self._num_models = 0

    def note_beat(self, beat: HostBeat, now: float) -> None:
        """Take in what a host tells; one beyond the limits is not heard, and those that are known keep their place."""
        known = self._hosts.get(beat.host)
        num = self._num_models + len(beat.models) - (0 if known is None else len(known[0].models))
        if num <= MAX_MODELS and (known is not None or len(self._hosts) < MAX_HOSTS):
            self._hosts[beat.host] = (beat, now)
            self._num_models = num

    def discount_silence(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of the hosts."""
        for name, (beat, heard_at) in self._hosts.items():
            self._hosts[name] = (beat, min(now, heard_at + lost_s))

    def sweep(self, now: float) -> bool:
        """Forget silent hosts; return whether there were any."""
        silent = [name for name, (_, heard_at) in self._hosts.items() if now - heard_at > HOST_SILENCE_S]
        for name in silent:
            self._num_models -= len(self._hosts.pop(name)[0].models)
        return bool(silent)

    def find(self, model: str, num_withheld: int = 0) -> HostedModel | None:
        """Return the model's state at the host that will serve it first; None if no host will.

        `num_withheld` workers of the model are heard, and take no requests (cordoned, or withdrawn for wrong answers).
        A host that has started no more than those will not serve it soon.
        """
        found = [
            each
            for beat in self.beats()
            for each in beat.models
            if each.name == model and (each.state != "awake" or not num_withheld or each.num_ready > num_withheld)
        ]
        return min(found, key=lambda each: (_COMING.index(each.state), each.ready_in_s), default=None)

    def names(self) -> set[str]:
        """Return the models that requests may wait for."""
        return {each.name for beat in self.beats() for each in beat.models if each.on_demand and each.state != "failed"}

    def hosts_of(self, model: str) -> list[str]:
        """Return the hosts that have a model."""
        return [beat.host for beat in self.beats() if any(each.name == model for each in beat.models)]

    def shown(self) -> list[dict[str, Any]]:
        """Return the hosts and their models, for operators."""
        return [
            {
                "host": beat.host,
                "memory_bytes": beat.memory_bytes,
                "used_bytes": beat.used_bytes,
                "models": [{name: getattr(model, name) for name in _SHOWN} for model in beat.models],
            }
            for beat in self.beats()
        ]

    def beats(self) -> Iterator[HostBeat]:
        """Yield the last message of each host."""
        for beat, _ in self._hosts.values():
            yield beat
