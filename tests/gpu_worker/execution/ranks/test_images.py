"""Models that see answer as `transformers` does on several ranks too: rank 0 encodes, and shares what it made."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker.core.media import SharedImages
from gpu_worker.core.model_runner import InterruptedRunnerError
from gpu_worker.execution.encoder import MissingImageError
from gpu_worker.execution.ranks import group as group_module
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.runner import GroupRunner, build_group_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, random_image
from tests.gpu_worker.models.vision.test_seeing import Seeing

IMAGES = [random_image(*size, seed) for seed, size in enumerate([(33, 51), (9, 8), (64, 64)])]


@contextmanager
def seeing_ranks(name: str, directory: Path, size: int = 2) -> Iterator[tuple[Seeing, RankGroup]]:
    groups: list[RankGroup] = []

    def build(config: RunnerConfig, images: SharedImages) -> GroupRunner:
        config = replace(config, tensor_parallel_size=size)
        groups.append(RankGroup(config, "warning"))
        return build_group_runner(config, groups[0], StartUp(), None, images)

    try:
        yield Seeing(name, directory, build=build), groups[0]
    finally:
        for group in groups:
            group.close()


def check(seeing: Seeing) -> None:
    """Compare with the oracle: beside text, and cut anywhere that one step may end."""
    run = seeing.run
    for budget in (400, run.least_budget + 7):
        run.restart(budget)
        sequences = [
            run.sequence(str(count), seeing.prompt(count), IMAGES[:count], prompt_logprobs=20, logprobs=20)
            for count in range(4)
        ]
        outcome = run.run(sequences, arrivals_per_step=1)
        for sequence in sequences:
            seeing.check(sequence, outcome)


def test_two_ranks_answer_about_images_also_after_one_is_killed(tmp_path: Path) -> None:
    """With rotations of several axes, and embeddings behind some layers."""
    with seeing_ranks("qwen3-vl", tmp_path) as (seeing, group):
        check(seeing)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(InterruptedRunnerError) as interruption:
            check(seeing)
        interruption.value.recover()
        check(seeing)


def test_image_without_pixels_ends_its_sequence_and_no_rank(tmp_path: Path) -> None:
    with seeing_ranks("qwen2.5-vl", tmp_path) as (seeing, group):
        run, names = seeing.run, ("good", "bad")
        for name in names:
            sequence = run.sequence(name, seeing.prompt(1), [IMAGES[name == "bad"]])
            if name == "bad":
                sequence.images = ()
            run.engine.add(sequence)
        finishes, errors = {}, set()
        while run.engine.has_work():
            for event in run.engine.step():
                finishes[event.sequence.id] = event.finish
            errors.add(type(run.engine.last_error))
        assert finishes == {"good": "length", "bad": "failed"}
        assert errors == {type(None), MissingImageError}
        assert group.lost is None
        check(seeing)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEEING_CASES))
def test_two_ranks_answer_about_images_of_every_family(name: str, tmp_path: Path) -> None:
    with seeing_ranks(name, tmp_path) as (seeing, _):
        check(seeing)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_ranks_that_meet_by_torch_answer_about_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "cpu_library", lambda: None)
    with seeing_ranks(name, tmp_path) as (seeing, _):
        check(seeing)
