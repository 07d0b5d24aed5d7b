"""Patterns of ranks and alphas match the names that PEFT's regular expressions do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.adapters.config import AdapterConfig, AdapterError, read_config
from gpu_worker.models.errors import CheckpointError

_NAMES = (
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.up_proj",
)
_KEYS = (
    *("q_proj", "^q_proj", "q_proj$", "^q_proj$", "self.attn.q_proj", r"self\.attn.q_proj", r"self_attn\.q_proj"),
    *(r".*\.q_proj", r"^.*\.q_proj$", r".*\.up_proj", "up_proj", "layers.0.mlp.up_proj", "0.self_attn.q_proj"),
    *("^model.layers.0.self_attn.q_proj", "^layers.0.self_attn.q_proj", "...", "proj", ".q_proj", r".*\.....q_proj"),
)


def _read(directory: Path, **fields: Any) -> AdapterConfig:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return read_config(directory)


@pytest.mark.parametrize("key", _KEYS)
def test_patterns_match_as_expressions_do(key: str, tmp_path: Path) -> None:
    config = _read(tmp_path, alpha_pattern={key: 7}, rank_pattern={key: 7})
    expected = [7 if re.match(rf"(.*\.)?({key})$", name) else 1 for name in _NAMES]
    assert [config.rank_of(name) for name in _NAMES] == expected


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    config = _read(tmp_path, alpha_pattern={"0.self_attn.q_proj": 7, "q_proj": 2, r".*\.q_proj": 3})
    assert [config.scale_of(name) for name in _NAMES] == [2, 7, 2, 1, 1]


@pytest.mark.parametrize("key", [r"layers\.\d+\.q_proj", "q_proj|k_proj", ".*q_proj", "q_proj\n", "", r"a\\b", "(a+)+"])
def test_other_expressions_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"field 'alpha_pattern' has the pattern .*only names of modules are read"
    ):
        _read(tmp_path, alpha_pattern={key: 7})


def test_parameters_are_matched_by_their_own_names(tmp_path: Path) -> None:
    patterns = {"q_proj": 3, "gate.weight": 5, "experts": 7, "down_proj": 9}
    parameters = ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    config = _read(tmp_path, alpha_pattern=patterns, target_parameters=parameters)
    names = ("layers.0.q_proj", "layers.0.mlp.gate", "layers.0.gate")
    assert [config.scale_of(name) for name in names] == [3, 5, 1]
    stacks = [config.stack_name("layers.0.mlp.experts", own) for own in (["gate_up_proj", "up_proj"], ["down_proj"])]
    assert [config.scale_of(name) for name in stacks] == [1, 9]
    with pytest.raises(AdapterError, match="target_parameters has to name one of gate_up_proj, up_proj"):
        _read(tmp_path, alpha_pattern=patterns).stack_name("layers.0.mlp.experts", ["gate_up_proj", "up_proj"])
