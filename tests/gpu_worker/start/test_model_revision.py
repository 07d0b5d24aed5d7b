from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.model_revision import is_same_revision, model_revision, served_revision


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    return tmp_path


def test_same_files_have_the_same_revision(model: Path) -> None:
    assert model_revision(model, "float32") == model_revision(model, "float32")


def test_other_weights_of_the_same_size_have_another_revision(model: Path) -> None:
    before = model_revision(model)
    (model / "model.safetensors").write_bytes(bytes([1]) * (1 << 20))
    assert model_revision(model) != before


def test_last_byte_and_small_files_count(model: Path) -> None:
    before = model_revision(model)
    (model / "model.safetensors").write_bytes(bytes((1 << 20) - 1) + b"x")
    changed_weights = model_revision(model)
    (model / "config.json").write_text("[]")
    assert len({before, changed_weights, model_revision(model)}) == 3


def test_settings_count(model: Path) -> None:
    assert model_revision(model, "float32") != model_revision(model, "bfloat16")


def test_each_setting_that_decides_answers_counts(model: Path) -> None:
    settings = ({}, {"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"simulate": 1.0})
    assert len({served_revision(WorkerConfig(model=model, **changed)) for changed in settings}) == len(settings)


def test_settings_that_change_no_answer_do_not_count(model: Path) -> None:
    settings = ({}, {"max_num_seqs": 3}, {"num_blocks": 9})
    assert len({served_revision(WorkerConfig(model=model, **changed)) for changed in settings}) == 1


def test_commit_of_a_model_from_the_hub_is_told(model: Path, tmp_path: Path) -> None:
    plain = served_revision(WorkerConfig(model=model))
    told = []
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (snapshot / file).symlink_to(model / file)
        told.append(served_revision(WorkerConfig(model=snapshot)))
    assert told == [f"{plain}@{'a' * 12}", f"{plain}@{'b' * 12}"]
    assert not is_same_revision(*told)
    # A copy of the same files that was not downloaded, or a worker of an older version, which tells no commit.
    assert is_same_revision(told[0], plain)
    assert is_same_revision(plain, told[0])
    assert not is_same_revision(told[0], served_revision(WorkerConfig(model=model, dtype="float32")))
