"""Checkpoints of NVIDIA's Model Optimizer against `transformers` on the dense weights, inputs rounded alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu_worker.quantization.checkpoints import (
    Made,
    assert_near_oracle_with_rounded_inputs,
    but_head,
    make_checkpoint,
)
from tests.gpu_worker.quantization.test_fp8 import static

FIELDS = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = make_checkpoint(tmp_path, FIELDS, but_head(static(0.02)))
    scales = {f"model.layers.{i}.self_attn.{part}.{part[0]}_scale" for i in range(2) for part in ("k_proj", "v_proj")}
    made.change_tensors(lambda tensors: tensors.update({name: torch.tensor(0.5) for name in scales}))
    return made


def move_configuration(made: Made, quantization: object) -> None:
    """Put it where the tool's first versions have it."""
    path = made.directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (made.directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


def test_float8_equals_the_oracle(made: Made) -> None:
    assert_near_oracle_with_rounded_inputs(made)


def test_configuration_may_be_a_file_of_its_own(made: Made) -> None:
    move_configuration(made, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]})
    assert_near_oracle_with_rounded_inputs(made)


def test_another_algorithm_is_refused_by_its_field(made: Made) -> None:
    made.change_config(quant_algo="NVFP4")
    assert "config.json: field 'quantization_config.quant_algo' is 'NVFP4'; supported: 'FP8'" in made.refusal()


@pytest.mark.parametrize("quantization", [["FP8"], {"exclude_modules": []}, None])
def test_a_damaged_file_is_refused(made: Made, quantization: object) -> None:
    move_configuration(made, quantization)
    assert "hf_quant_config.json: field 'quantization" in made.refusal()
