"""How long a step takes: the device's part by a formula, the host's part between two steps, and the spread of both."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_NUM_FACTORS = 1 << 16
Chunk = tuple[int, int]
"""A part of a prompt in a step: tokens computed before it, and its own."""


class DeviceTimes(Protocol):
    """Seconds of a device for the work of one step."""

    def seconds(self, num_decodes: int, num_context: int, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step.

        Args:
            num_decodes: Sequences that compute one token each.
            num_context: Tokens that these attend to, over all of them.
            chunks: Parts of prompts.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """A sum of parts in proportion to the work, as measured steps are fitted by. All are seconds.

    Attributes:
        fixed_s: Of each step.
        sequence_s: Of each sequence in it.
        token_s: Of each token of a prompt, beyond the sequence's part.
        context_s: Of each token that a decode attends to.
        pair_s: Of each pair of a prompt's token and one that it attends to.
    """

    fixed_s: float
    sequence_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, num_decodes: int, num_context: int, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step."""
        seconds = self.fixed_s + self.sequence_s * num_decodes + self.context_s * num_context
        for start, length in chunks:
            pairs = length * start + length * (length + 1) / 2
            seconds += self.sequence_s + self.token_s * (length - 1) + self.pair_s * pairs
        return seconds


def growing_times(step_ms: float, growth: float) -> LinearTimes:
    """Return steps of `step_ms` to which every further token adds the share `growth`."""
    fixed_s = step_ms / 1000
    return LinearTimes(fixed_s * (1 - growth), fixed_s * growth, fixed_s * growth)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What a step takes besides the device: planning, sampling's results, text, frames.

    Attributes:
        step_s: Fixed overhead between two steps.
        sequence_s: For each sequence of a step.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Both parts, and how real steps lie around their sum.

    Attributes:
        spread: Quantiles of measured over predicted time, two at least, evenly spaced from the least to the greatest.
            Empty: steps take exactly what is predicted.
    """

    device: DeviceTimes
    host: HostTimes = HostTimes()
    spread: tuple[float, ...] = ()

    def seconds(self, factor: float, num_decodes: int, num_context: int, chunks: list[Chunk]) -> tuple[float, float]:
        """Return the device's seconds of a step, and those from its beginning to the next one's.

        Args:
            factor: By which it differs from the prediction.
            num_decodes: As `DeviceTimes.seconds` has it, as the next two.
            num_context: Tokens that decodes attend to.
            chunks: Parts of prompts.
        """
        device_s = self.device.seconds(num_decodes, num_context, chunks)
        host_s = self.host.step_s + self.host.sequence_s * (num_decodes + len(chunks))
        return device_s * factor, (device_s + host_s) * factor

    def factors(self, seed: int) -> list[float]:
        """Draw by how much steps differ from their prediction; nothing where they do not."""
        if not self.spread:
            return []
        generator = random.Random(f"steps/{seed}")
        return [self._quantile(generator.random()) for _ in range(_NUM_FACTORS)]

    def _quantile(self, share: float) -> float:
        place = share * (len(self.spread) - 1)
        index = min(int(place), len(self.spread) - 2)
        low, high = self.spread[index], self.spread[index + 1]
        return low + (high - low) * (place - index)
