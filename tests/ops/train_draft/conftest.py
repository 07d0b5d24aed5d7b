"""Targets to train for: tiny models that are sure of what they say, and a text in their vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ops.train_draft.job import TrainDraftJob
from ops.train_draft.material import MaterialPlan
from ops.train_draft.optimization import Length
from ops.train_draft.sizes import DraftShape
from tests.gpu_worker.models.conftest import one_thread
from tests.ops.quantize.layer_models import save_model

__all__ = ["one_thread"]

JobMaker = Callable[..., TrainDraftJob]
ChangedTarget = Callable[..., Path]


def ignore(stage: str, done: int, total: int, note: str = "") -> None:
    """Take no notice of how far a job is."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save_model(directory, tie_word_embeddings=False)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 6
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    save_model(directory, "qwen3", tie_word_embeddings=True)
    return directory


@pytest.fixture
def changed(target: Path, tmp_path: Path) -> ChangedTarget:
    """Return a maker of copies of the target whose configurations have other fields."""

    def make(name: str, /, **fields: Any) -> Path:
        model = shutil.copytree(target, tmp_path / name)
        config = json.loads((model / "config.json").read_text()) | fields
        (model / "config.json").write_text(json.dumps(config))
        return model

    return make


def break_embedding(model: Path, tokens: int | slice) -> None:
    """Make some tokens' weights be no numbers."""
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.fixture
def job(target: Path, tmp_path: Path) -> JobMaker:
    """Return a maker of short jobs."""

    def make(
        kind: str, out: str = "draft", *, model: Path = target, steps: int = 2, seed: int = 0, **shape: int | bool
    ) -> TrainDraftJob:
        plan = MaterialPlan(model, (model / "text.txt",), (), num_tokens=512, own_share=0.5, window=32, seed=seed)
        return TrainDraftJob(kind, tmp_path / out, Length(steps, None), plan, DraftShape(**shape))

    return make
