"""Sequences about images beside adapters and models that draft; `transformers` is the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer, with_room_for_proposer
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.adapters.peft_files import linear_sizes, merge, write_adapter
from tests.gpu_worker.adapters.test_merged import place
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, random_image
from tests.gpu_worker.models.vision.test_seeing import Seeing


@pytest.mark.parametrize("name", SEEING_CASES)
def test_adapters_of_the_text_part_answer_about_images(name: str, tmp_path: Path) -> None:
    """Sequences with one and without see the same image in the same steps; then in crowded ones, with drafts."""
    seeing = Seeing(name, tmp_path / "model", max_loras=1)
    sizes = linear_sizes(seeing.model, r".*(?:language_model|text_model).*")
    adapter = write_adapter(tmp_path / "adapter", sizes, strength=3)
    place(seeing.run.runner.model, 0, adapter)

    def sequences(emitted: Mapping[str, tuple[int, ...]] = {}, **options: Any) -> list[Sequence]:
        image = [random_image(24, 32, 1)]
        found = [seeing.run.sequence(s, seeing.prompt(1), image, 16, emitted.get(s, ()), **options) for s in "abcd"]
        for sequence in found[1::2]:
            sequence.adapter, sequence.salt = 0, b"adapter"
        return found

    adapted = sequences(logprobs=20)
    outcome = seeing.run.run(adapted, arrivals_per_step=2)
    for sequence in adapted[::2]:
        seeing.check(sequence, outcome)
    merge(seeing.model.float(), adapter)
    seeing.model.double()
    for sequence in adapted[1::2]:
        seeing.check(sequence, outcome)
    expected = outcome.tokens
    assert expected["a"] == expected["c"] != expected["b"] == expected["d"]
    seeing.run.runner.verify_drafts_of(ChainProposer(expected, 0.8))
    num_blocks = 3 * sum(-(-s.num_tokens // seeing.run.runner.block_size) + 4 for s in sequences()) // 4
    seeing.run.restart(64, policy=FixedDepth(3), num_blocks=num_blocks, headroom_tokens=1, enable_prefix_caching=False)
    crowded = seeing.run.run(sequences())
    assert crowded.num_preemptions > 0
    assert crowded.tokens == expected
    assert seeing.run.scheduler.speculation is not None
    assert seeing.run.scheduler.speculation.num_accepted_tokens > 0
    seeing.run.restart(64, policy=FixedDepth(3))
    moved = seeing.run.run(sequences({name: tuple(tokens[:7]) for name, tokens in expected.items()}))
    assert moved.tokens == {name: tokens[7:] for name, tokens in expected.items()}


def test_draft_model_that_could_see_drafts_without_images(tmp_path: Path) -> None:
    """As a smaller one of the same family: its checkpoint has a tower, whose text part alone makes drafts."""
    seeing = Seeing("gemma3", tmp_path)
    images = [random_image(24, 32, 1)]
    sequences = [seeing.run.sequence(name, seeing.prompt(1), images, 20) for name in "ab"]
    expected = seeing.run.run(sequences).tokens
    settings = WorkerConfig(speculative="draft", draft_model=tmp_path)
    config = RunnerConfig(tmp_path, block_size=4, num_blocks=300, dtype="float32", max_model_len=512, takes_images=True)
    config = with_room_for_proposer(settings, config)
    seeing.run.runner.verify_drafts_of(build_proposer(settings, config, seeing.run.runner))
    seeing.run.restart(400, policy=FixedDepth(3))
    sequences = [seeing.run.sequence(name, seeing.prompt(1), images, 20) for name in "ab"]
    assert seeing.run.run(sequences).tokens == expected
    assert seeing.run.scheduler.speculation is not None
    assert seeing.run.scheduler.speculation.num_accepted_tokens > 0
