"""How long a step takes: the device's part by a formula, the host's part between two steps, and the spread of both."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gpu_worker.core.plan import StepPlan

_NUM_FACTORS = 1 << 16
_COOLING_TOKENS = 128
_LEAST_COLDNESS = 0.01
Chunk = tuple[int, int]
"""A part of a prompt in a step: tokens computed before it, and its own."""


class StepWork(NamedTuple):
    """The work of a step.

    Attributes:
        num_decodes: Sequences that compute one token each.
        num_context: Sum of the tokens that they attend to.
        chunks: Prompt chunks.
        coldness: Share of the caches that prompt chunks of earlier steps have taken from weights and keys, from 0 to 1.
    """

    num_decodes: int
    num_context: int
    chunks: Sequence[Chunk] = ()
    coldness: float = 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences of the step."""
        return self.num_decodes + len(self.chunks)

    @property
    def coldness_after(self) -> float:
        """Coldness of the next step: a prompt of 128 tokens takes all of the caches, and each step wins half back.

        Both numbers are those by which measured steps of the CPU engine were fitted best.
        """
        left = self.coldness / 2 if self.coldness > _LEAST_COLDNESS else 0.0
        return max(left, min(1.0, sum(length for _, length in self.chunks) / _COOLING_TOKENS)) if self.chunks else left


def step_work(plan: StepPlan, coldness: float = 0.0) -> StepWork:
    """Return what a plan computes; `coldness` is that after the step before."""
    num_decodes, starts = plan.num_decodes, plan.starts
    if not plan.lengths:
        return StepWork(num_decodes, sum(starts) + num_decodes, (), coldness)
    chunks = list(zip(starts[num_decodes:], plan.lengths, strict=True))
    return StepWork(num_decodes, sum(starts[:num_decodes]) + num_decodes, chunks, coldness)


class DeviceTimes(Protocol):
    """Seconds of a device for the work of one step."""

    def seconds(self, num_decodes: int, num_context: int, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step, whose parts `StepWork` explains."""
        ...


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """A sum of parts in proportion to the work, as measured steps are fitted by. All are seconds.

    Attributes:
        fixed_s: Of each step.
        sequence_s: Of each sequence in it.
        token_s: Of each token, of decodes and prompts, beyond `free_tokens`.
        context_s: Of each token that a decode attends to.
        pair_s: Of each pair of a prompt's token and one that it attends to.
        free_tokens: As many tokens are computed in the time that it takes to read the weights.
    """

    fixed_s: float
    sequence_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
    free_tokens: int = 0

    def seconds(self, num_decodes: int, num_context: int, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step."""
        num_tokens = num_decodes
        seconds = self.fixed_s + self.sequence_s * num_decodes + self.context_s * num_context
        for start, length in chunks:
            num_tokens += length
            seconds += self.sequence_s + self.pair_s * (length * start + length * (length + 1) / 2)
        return seconds + self.token_s * max(0, num_tokens - self.free_tokens)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What a step takes besides the device: planning, sampling's results, text, frames.

    Attributes:
        step_s: Fixed overhead between two steps.
        sequence_s: For each sequence of a step.
        prompt_s: Of a step with prompt chunks, besides: digests of blocks, and the first text of an answer.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    prompt_s: float = 0.0

    def seconds(self, num_sequences: float, has_prompts: bool = False) -> float:
        """Return the host's time of a step."""
        return self.step_s + self.sequence_s * num_sequences + (self.prompt_s if has_prompts else 0.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of real steps: quantiles of measured over predicted time.

    They are evenly spaced from the least to the greatest, two at least. Empty: steps take exactly the predicted time.

    Attributes:
        decodes: For steps without prompt chunks. They are short, so a delay is a larger share of them.
        prompts: For steps with prompt chunks.
    """

    decodes: tuple[float, ...] = ()
    prompts: tuple[float, ...] = ()

    def factors(self, seed: int) -> tuple[list[float], list[float]]:
        """Draw by how much steps of both kinds differ from their prediction; nothing where they do not."""
        generator = random.Random(f"steps/{seed}")
        shares = [generator.random() for _ in range(_NUM_FACTORS)] if self.decodes or self.prompts else []
        decodes, prompts = ([_quantile(each, share) for share in shares] for each in (self.decodes, self.prompts))
        return decodes, prompts


def _quantile(quantiles: tuple[float, ...], share: float) -> float:
    if not quantiles:
        return 1.0
    place = share * (len(quantiles) - 1)
    index = min(int(place), len(quantiles) - 2)
    low, high = quantiles[index], quantiles[index + 1]
    return low + (high - low) * (place - index)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Device, host, and how real steps lie around their sum; `cold_s` is what a step takes longer with cold caches."""

    device: DeviceTimes
    host: HostTimes = HostTimes()
    spread: Spread = Spread()
    cold_s: float = 0.0

    def seconds(self, work: StepWork) -> tuple[float, float]:
        """Return the device's seconds of a step, and those from its beginning to the next one's."""
        device_s = self.device.seconds(work.num_decodes, work.num_context, work.chunks) + self.cold_s * work.coldness
        return device_s, device_s + self.host.seconds(work.num_sequences, bool(work.chunks))
