"""Runs the real engine on a model that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_worker.core.media import SharedImages
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import MediaConfig, SchedulerConfig, StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.vision.processor import MediaProcessor
from gpu_worker.models.vision.registry import read_processor, read_vision
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import Outcome
from tests.gpu_worker.models.vision.seeing_models import Pixels, Ref


class SeeingRun:
    """A model, and an engine whose prefix cache stays from one `run` to the next."""

    def __init__(self, directory: Path, *, block_size: int = 4, num_blocks: int = 300, **settings: Any) -> None:
        self.directory = directory
        processor = read_processor(directory)
        assert processor is not None
        self.processor: MediaProcessor = processor
        self.images = SharedImages()
        settings = {"dtype": "float32", "max_num_seqs": 12, "max_model_len": 512, "max_draft_tokens": 3, **settings}
        config = RunnerConfig(
            directory, block_size=block_size, num_blocks=num_blocks, num_threads=1, takes_images=True, **settings
        )
        self.runner = build_runner(config, images=self.images)
        vision = read_vision(directory)
        assert vision is not None
        self._vision = vision
        self._whole = vision.max_rows if vision.form.is_bidirectional else 0
        self.restart(self.least_budget + 64)

    @property
    def least_budget(self) -> int:
        """Tokens of a step at least."""
        return 2 + self._whole

    def restart(
        self,
        token_budget: int = 64,
        *,
        num_blocks: int | None = None,
        max_rows: int = 1000,
        policy: DraftPolicy | None = None,
        **settings: Any,
    ) -> None:
        """Begin with an empty cache."""
        self.runner.clear()
        state: StateConfig | None = None
        if self.runner.model_config.has_states:
            state = state_config(self.runner.num_state_slots, self.runner.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=self.runner.block_size,
                num_blocks=num_blocks or self.runner.num_blocks,
                windows=self.runner.windows,
                max_num_seqs=min(12, token_budget - self._whole),
                max_num_batched_tokens=token_budget,
                max_model_len=self.runner.max_model_len,
                media=MediaConfig(self._vision.num_stages, max_rows, self._whole),
                state=state,
                **settings,
            ),
            None if policy is None else Speculation(policy),
            images=self.images,
        )
        self.engine = Engine(self.scheduler, self.runner)

    def sequence(
        self,
        name: str,
        token_ids: list[int],
        images: list[tuple[Ref, Pixels]],
        max_tokens: int = 4,
        emitted: tuple[int, ...] = (),
        **sampling: Any,
    ) -> Sequence:
        """Return the sequence of a prompt with a placeholder for each image."""
        refs = [ref for ref, _ in images]
        expanded, spans = self.processor.expand(token_ids, refs)
        chosen = Sampling(temperature=0.0, max_tokens=max_tokens, **sampling)
        sequence = Sequence(name, [*expanded, *emitted], len(expanded), chosen, max_tokens=max_tokens)
        sequence.media = tuple(spans)
        sequence.images = tuple(self.processor.prepare(ref, pixels) for ref, pixels in images)
        return sequence

    def run(self, sequences: list[Sequence], arrivals_per_step: int = 1000) -> Outcome:
        """Generate until every sequence has finished."""
        outcome, coming = Outcome(), list(sequences)
        while coming or self.engine.has_work():
            for sequence in coming[:arrivals_per_step]:
                self.engine.add(sequence)
            del coming[:arrivals_per_step]
            for event in self.engine.step():
                outcome.add(event)
            if self.engine.last_error is not None:
                raise self.engine.last_error
        self.scheduler.check_integrity()
        outcome.num_preemptions = self.scheduler.stats.num_preemptions
        outcome.num_prefix_hits = self.scheduler.stats.num_prefix_hits
        return outcome


def tower_pixels(sequence: Sequence) -> list[Pixels]:
    """Return the images of a sequence as the tower reads them."""
    return [tile for image in sequence.images for tile in image.values]
