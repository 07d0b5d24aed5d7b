"""A profile: the measured step times of a running system, as a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from gpu_worker.core.scheduler_config import SchedulerConfig
from ops.simulation.step_time import HostTimes, LinearTimes, Spread, StepTimes
from shared.errors import HeadraceError

_MAX_BYTES = 1 << 20


class ProfileError(HeadraceError):
    """A profile cannot be used."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The settings of the workers that were measured, as `SchedulerConfig` has them."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def config(self) -> SchedulerConfig:
        """Return the configuration of a scheduler."""
        return SchedulerConfig(**asdict(self))


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times.

    Attributes:
        measured_on: The system and its machine, in words.
        device: Device times of steps.
        host: Host times between steps.
        latency_s: Time of a request besides queue and steps.
        cold_s: What a step takes longer with cold caches.
        spread: Spread of measured over predicted step times.
        errors: Relative errors of predictions on loads that the fit did not use, by measure.
    """

    measured_on: str
    device: LinearTimes
    host: HostTimes
    latency_s: float
    worker: WorkerLimits
    cold_s: float
    spread: Spread = field(default_factory=Spread)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> StepTimes:
        """The times of steps."""
        return StepTimes(self.device, self.host, self.spread, self.cold_s)


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: The file is not a valid profile.
    """
    content = path.read_bytes()[: _MAX_BYTES + 1]
    try:
        profile = msgspec.json.decode(content, type=Profile)
        profile.worker.config()
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProfileError(f"{path} is not a profile: {error}") from None
    numbers = [*msgspec.to_builtins(profile.device).values(), *msgspec.to_builtins(profile.host).values()]
    numbers += [profile.latency_s, profile.cold_s]
    quantiles = (profile.spread.decodes, profile.spread.prompts)
    if min(*numbers, *chain(*quantiles)) < 0 or any(len(each) == 1 for each in quantiles):
        raise ProfileError(f"{path} is not a profile: times are not negative, and a spread has two numbers at least")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
