"""What was trained computes the same where it is served, by code of another author."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.speculative.eagle.config import read_eagle_config
from gpu_worker.speculative.eagle.layer import load_eagle_layer
from gpu_worker.speculative.hidden_vectors.form import DraftLayer
from gpu_worker.speculative.medusa.proposer import load_medusa_heads
from kernels.layer_cache import LayerCache, allocate_layer_cache
from ops.train_draft.eagle import EagleStudent, check_rotary_settings
from ops.train_draft.folder import write_draft
from ops.train_draft.medusa import MedusaStudent
from ops.train_draft.rows import Batch
from ops.train_draft.target import HiddenVectors, read_vocabulary
from shared.errors import ConfigError
from tests.ops.train_draft.conftest import ChangedTarget

CPU = torch.device("cpu")
LENGTH = 24


@pytest.fixture(scope="module")
def batch(target: Path) -> Batch:
    row = torch.randint(1, 150, (LENGTH,), generator=torch.Generator().manual_seed(1))
    return Batch(row[None], HiddenVectors(target, torch.float32, LENGTH).of(row)[None])


def disturb(module: torch.nn.Module) -> None:
    """Change all weights, to what sixteen bits hold."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    module.half().float()


@pytest.mark.parametrize("shares_head", [False, True])
def test_medusa_heads_draft_alike_in_training_and_in_the_worker(
    target: Path, batch: Batch, tmp_path: Path, shares_head: bool
) -> None:
    student = MedusaStudent(read_model_config(target), read_vocabulary(target), 3, 2, shares_head=shares_head)
    disturb(student.module)
    write_draft(student, target, tmp_path)

    heads = load_medusa_heads(tmp_path, load_model(target, torch.float32, CPU))
    with torch.inference_mode():
        served = heads.logits(batch.hidden[0], 3).argmax(-1).T
        trained = student.draft_tokens(batch, 3)[0]
    assert torch.equal(trained, served)


def test_eagle_layer_predicts_alike_in_training_and_in_the_worker(target: Path, batch: Batch, tmp_path: Path) -> None:
    student = EagleStudent(read_model_config(target), read_vocabulary(target), target, 3, batch)
    disturb(student.module)
    write_draft(student, target, tmp_path)

    with torch.inference_mode():
        embedded = torch.nn.functional.embedding(batch.token_ids[:, 1:], read_vocabulary(target).embedding)
        first, second, third = (made[0] for made in student.module.steps(embedded, batch.hidden[:, :-1], 3))
    layer = load_eagle_layer(tmp_path, load_model(target, torch.float32, CPU))
    for place in (0, 7, LENGTH - 4):
        cache = allocate_layer_cache(1, LENGTH, layer.config.num_kv_heads, layer.config.head_dim, torch.float32, CPU)
        known = forward(layer, cache, batch.token_ids[0, 1 : place + 2], batch.hidden[0, : place + 1], 0)
        torch.testing.assert_close(known, first[: place + 1], atol=1e-4, rtol=1e-4)
        drafted = known[-1:]
        for step, expected in enumerate((second, third), 1):
            token = batch.token_ids[0, place + step + 1 : place + step + 2]
            drafted = forward(layer, cache, token, drafted, place + step)
            torch.testing.assert_close(drafted[0], expected[place + step], atol=1e-4, rtol=1e-4)


@pytest.fixture
def scaled_target(changed: ChangedTarget) -> Path:
    """Return a target as Phi and others tell what length they were trained on: beside the scaling, not within it."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return changed("scaled", rope_parameters=scaling | {"rope_theta": 500.0}, original_max_position_embeddings=16)


def test_eagle_layer_is_served_with_the_rotary_frequencies_that_it_was_trained_with(
    scaled_target: Path, batch: Batch, tmp_path: Path
) -> None:
    config = read_model_config(scaled_target)
    student = EagleStudent(config, read_vocabulary(scaled_target), scaled_target, 2, batch)
    write_draft(student, scaled_target, tmp_path / "draft")
    check_rotary_settings(scaled_target)

    served = read_eagle_config(JsonFile.read(tmp_path / "draft" / "config.json"), config).layer.rope
    assert served == config.rope
    assert served.original_max_len == 16


def test_rotary_settings_that_the_layer_cannot_have_are_refused(
    scaled_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.train_draft.eagle._TAKEN_OVER", ("rope_parameters", "max_position_embeddings"))

    with pytest.raises(ConfigError, match=r"^HEADRACE_TARGET: .*scaled has rotary settings that an EAGLE layer cannot"):
        check_rotary_settings(scaled_target)


def forward(
    layer: DraftLayer, cache: LayerCache, token_ids: torch.Tensor, hidden: torch.Tensor, start: int
) -> torch.Tensor:
    """Compute entries from `start` on, in a cache of one block."""
    positions = torch.arange(start, start + len(token_ids))
    context = AttentionContext(
        caches=[cache],
        slot_mapping=positions,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        context_lens=torch.tensor([start + len(token_ids)], dtype=torch.int32),
        max_query_len=len(token_ids),
        max_context_len=start + len(token_ids),
    )
    with torch.inference_mode():
        return layer.forward(token_ids, hidden, positions, context)
