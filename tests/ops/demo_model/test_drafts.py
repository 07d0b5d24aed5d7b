"""The shipped drafts: their files, and what they are worth to the engine that serves them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ops.demo_model import drafts
from ops.demo_model.card import draft_section
from ops.demo_model.corpus import training_documents
from ops.demo_model.draft_serving import serve_drafts
from ops.demo_model.drafts import DRAFT_FOLDERS, train_all
from ops.demo_model.export import MODEL_FOLDER
from ops.train_draft import material
from ops.train_draft.optimization import Length
from tests.gpu_worker.models.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(params=list(DRAFT_FOLDERS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def training(kind: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((DRAFT_FOLDERS[kind] / "training.json").read_text())
    return record


def test_weights_are_finite_float16_and_at_most_four_megabytes(kind: str) -> None:
    path = DRAFT_FOLDERS[kind] / "model.safetensors"

    with safe_open(path, framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118

    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert path.stat().st_size <= 4_000_000


def test_engine_accepts_draft_tokens(kind: str) -> None:
    assert serve_drafts(kind, DRAFT_FOLDERS[kind], num_prompts=4)["accepted_a_draft"] > 0.5


@pytest.mark.slow
def test_engine_accepts_as_many_draft_tokens_as_the_record_says(kind: str) -> None:
    served = serve_drafts(kind, DRAFT_FOLDERS[kind])

    # How deep EAGLE's chains are depends on what the machine takes for a pass of the layer.
    assert served["accepted_a_draft"] > 0.7 * training(kind)["served"]["accepted_a_draft"]


def test_card_states_the_figures_of_the_records(kind: str) -> None:
    section = draft_section(MODEL_FOLDER)

    assert section in (MODEL_FOLDER / "README.md").read_text()
    assert f"{training(kind)['accepted_up_to'][0]:.1%}" in section
    assert f"{training(kind)['served']['accepted_a_draft']:.2f}" in section


@pytest.mark.slow
def test_all_drafts_are_trained_measured_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "training_documents", lambda: islice(training_documents(), 12))
    monkeypatch.setattr(drafts, "serve_drafts", partial(serve_drafts, num_prompts=2))
    monkeypatch.setattr(material, "HELD_OUT_ROWS", 2)

    train_all(tmp_path, Length(2, None), num_tokens=2048, seed=3)

    for kind, shipped in DRAFT_FOLDERS.items():
        record = json.loads((tmp_path / shipped.name / "training.json").read_text())
        assert record.keys() == training(kind).keys()
        assert (record["kind"], record["steps"], record["served"]["prompts"]) == (kind, 2, 2)
    shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    assert "accepted" in draft_section(tmp_path / "model")
