"""Targets to train for: tiny models with random weights, and a text in their vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.train_draft.job import DraftShape, TrainDraftJob
from ops.train_draft.material import MaterialPlan
from ops.train_draft.optimization import Length
from tests.gpu_worker.models.conftest import one_thread
from tests.ops.quantize.layer_models import TEXT, save_model

__all__ = ["one_thread"]

JobMaker = Callable[..., TrainDraftJob]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(directory, request.param, tie_word_embeddings=request.param == "llama")
    (directory / "text.txt").write_text(TEXT)
    return directory


@pytest.fixture
def job(target: Path, tmp_path: Path) -> JobMaker:
    """Return a maker of short jobs."""

    def make(kind: str, out: str = "draft", *, steps: int = 24, seed: int = 0, **shape: int | bool) -> TrainDraftJob:
        plan = MaterialPlan(target, (target / "text.txt",), (), num_tokens=512, own_share=0.5, window=32, seed=seed)
        return TrainDraftJob(kind, tmp_path / out, Length(steps, None), plan, DraftShape(**shape))

    return make
