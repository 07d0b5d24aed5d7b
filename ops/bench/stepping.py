"""An engine that a bench steps by itself: real scheduler, real runner, no queue, no tokenizer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from gpu_worker.core.media import SharedImages
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import MediaConfig, SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling

_NUM_SPECIAL = 3


class SteppedEngine:
    """Owns an engine, and makes the random prompts that it is given: they share no beginning."""

    def __init__(self, engine: Engine, vocabulary: range) -> None:
        self.engine = engine
        self._random = random.Random(0)
        self._vocabulary = vocabulary
        self._num_made = 0

    def random_prompt(self, length: int) -> list[int]:
        """Return tokens that no earlier prompt began with."""
        return self._random.choices(self._vocabulary, k=length)

    def add(self, prompt: list[int], max_tokens: int, temperature: float = 0.0) -> Sequence:
        """Queue a sequence that decodes the given number of tokens."""
        self._num_made += 1
        sampling = Sampling(temperature=temperature, seed=self._num_made, ignore_eos=True)
        name = f"sequence-{self._num_made}"
        sequence = Sequence(name, list(prompt), len(prompt), sampling, max_tokens=max_tokens)
        self.engine.add(sequence)
        return sequence

    def step(self) -> list[SequenceEvent]:
        """Take a step.

        Raises:
            RuntimeError: It failed.
        """
        events = self.engine.step()
        if self.engine.last_error is not None:
            raise RuntimeError(f"the engine failed: {self.engine.last_error}") from self.engine.last_error
        return events

    def step_while(self, condition: Callable[[], bool]) -> float:
        """Step as long as a condition holds; return the seconds.

        Raises:
            RuntimeError: A step failed.
        """
        started = time.perf_counter()
        while condition():
            self.step()
        return time.perf_counter() - started

    def run(self) -> float:
        """Step until every sequence has ended; return the seconds."""
        return self.step_while(self.engine.has_work)

    def prefill(self, sequences: list[Sequence]) -> float:
        """Step until all of some sequences decode; return the seconds."""
        return self.step_while(lambda: any(sequence.num_output_tokens == 0 for sequence in sequences))

    def step_seconds(self, count: int) -> list[float]:
        """Return the seconds of each of the next steps."""
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        return seconds

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences that have not ended by themselves, and what else there is."""
        for sequence in sequences:
            assert self.engine.abort(sequence.id) is not None, "a sequence has ended before its time"
        self.run()

    def serve_s(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Return the seconds from adding prompts to an idle engine to the last of their tokens."""
        started = time.perf_counter()
        for prompt in prompts:
            self.add(prompt, max_tokens)
        self.run()
        return time.perf_counter() - started


def engine_of(
    runner: TorchModelRunner,
    *,
    max_num_seqs: int,
    token_budget: int = 512,
    has_prefix_cache: bool = True,
    speculation: Speculation | None = None,
    divided: ModelRunner | None = None,
    media: MediaConfig | None = None,
    images: SharedImages | None = None,
) -> SteppedEngine:
    """Make an engine that has all blocks of a model's runner, and takes sequences as long as it does.

    The first tokens of a vocabulary are special ones, and in no prompt. Where the runner is one of
    several ranks, `divided` runs them all.
    """
    config = SchedulerConfig(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=runner.max_model_len,
        enable_prefix_caching=has_prefix_cache,
        windows=runner.windows,
        media=media,
    )
    engine = Engine(Scheduler(config, speculation, images=images), divided or runner)
    return SteppedEngine(engine, range(_NUM_SPECIAL, runner.model_config.vocab_size))
