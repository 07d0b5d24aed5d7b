"""What a model's `generation_config.json` advises, as its worker tells it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from gpu_worker.text.model_directory import ModelDirectory, read_model_directory, read_sampling_defaults
from shared.sampling import SamplingDefaults


def test_what_the_file_advises_is_read(tmp_path: Path, demo_directory: ModelDirectory) -> None:
    directory = tmp_path / "model"
    shutil.copytree(demo_directory.path, directory)
    advised = {"eos_token_id": 0, "do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.8}
    (directory / "generation_config.json").write_text(json.dumps(advised))
    expected = SamplingDefaults(temperature=1.0, top_k=20, top_p=0.8)
    assert read_model_directory(directory).sampling_defaults == expected
    (directory / "generation_config.json").unlink()
    assert read_model_directory(directory).sampling_defaults is None


def test_value_that_no_request_could_have_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read_sampling_defaults({"temperature": 3.5, "top_p": "much", "min_p": float("nan"), "top_k": None})
    assert found is None
    assert [record.getMessage().split()[1] for record in caplog.records] == ["temperature", "top_p", "min_p"]
    assert read_sampling_defaults({"temperature": 3.5, "top_k": 50}) == SamplingDefaults(top_k=50)
