"""Perplexity of a model on a text, as its engine computes it: quantized weights, KV cache and kernels included.

The text is one run of tokens. Windows of `context` tokens begin every `stride` tokens; each token is scored once, in
the first window that reaches it, so that all but those of the first window have at least `context - stride` tokens
before them. The perplexity is the exponential of the mean negative log probability of the scored tokens, which are all
but the very first. This is the sliding window that the documentation of `transformers` describes under "Perplexity of
fixed-length models".

The tokens that are most likely at the same places say how often two models choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.core.step import LogprobEntry
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling

_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Score:
    """The sum of negative log probabilities, in nats, of the tokens scored so far."""

    nats: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Return the exponential of the mean."""
        return math.exp(self.nats / self.num_tokens)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model sees, of which the last `num_scored` are scored."""

    token_ids: Sequence[int]
    num_scored: int


def windows(token_ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Cut a text into windows of at most `context` tokens, `stride` apart, that score each token but the first once."""
    scored_until = 1
    for first in range(0, len(token_ids), stride):
        last = min(first + context, len(token_ids))
        if last > scored_until:
            yield Window(token_ids[first:last], last - scored_until)
            scored_until = last
        if last == len(token_ids):
            return


def score(runner: TorchModelRunner, token_ids: Sequence[int], context: int, stride: int) -> Iterator[Score]:
    """Score a text, reporting after each window; `RuntimeError`, whose cause says why, if the engine fails."""
    engine = _engine(runner)
    nats, num_tokens = 0.0, 0
    for window in windows(token_ids, context, stride):
        nats -= math.fsum(entry.logprob for entry in _scored(engine, runner, window))
        num_tokens += window.num_scored
        yield Score(nats, num_tokens)


def _engine(runner: TorchModelRunner) -> Engine:
    return Engine(
        Scheduler(
            SchedulerConfig(
                block_size=runner.block_size,
                num_blocks=runner.num_blocks,
                windows=runner.windows,
                max_num_seqs=1,
                max_num_batched_tokens=_BATCHED_TOKENS,
                max_model_len=runner.max_model_len,
                # A cached prefix would not be computed, and so not be scored.
                enable_prefix_caching=False,
            )
        ),
        runner,
    )


def _scored(engine: Engine, runner: TorchModelRunner, window: Window) -> list[LogprobEntry]:
    token_ids = list(window.token_ids)
    sampling = Sampling(prompt_logprobs=0)
    sequence = EngineSequence("window", token_ids, len(token_ids), sampling, max_tokens=0)
    engine.add(sequence)
    found: list[LogprobEntry] = []
    while engine.has_work():
        for event in engine.step():
            found += event.prompt_logprobs
        if engine.last_error is not None:
            raise RuntimeError("the engine failed") from engine.last_error
    # The runner may serve another engine next, whose plans do not know this sequence.
    runner.clear()
    return found[-window.num_scored :]
