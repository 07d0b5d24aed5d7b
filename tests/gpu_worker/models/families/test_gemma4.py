"""Gemma 4's small models: layers without keys of their own, and what their configuration may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.layers.cache_layout import KeepsTokens, ReadsLayer
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.loader import load_model, weights_bytes
from gpu_worker.models.registry import read_model_config
from kernels.layer_cache import CacheShape
from tests.gpu_worker.models.families.dense_cases import CASES
from tests.gpu_worker.models.families.oracle_checks import assert_logits_equal
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.pairs import CPU


def test_layers_that_share_keep_nothing(tmp_path: Path) -> None:
    save_case(CASES["gemma4-e"], tmp_path)
    near, far = KeepsTokens(CacheShape(2, 20, 20), 9), KeepsTokens(CacheShape(2, 28, 28))
    layout = read_model_config(tmp_path).cache_layout
    assert layout.layers == (near, far, near, ReadsLayer(1), ReadsLayer(1))
    assert [group.layers for group in layout.groups] == [(1,), (0, 2)]


def test_projections_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    oracle = save_case(CASES["gemma4-e"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def count_bytes() -> int:
        names = read_model_config(tmp_path).block.names
        return weights_bytes(tmp_path, torch.float32, CPU, is_tied=True, names=names)

    before = count_bytes()
    for part, shape in {"k_proj": (56, 48), "v_proj": (56, 48), "k_norm": (28,)}.items():
        tensors[f"model.layers.4.self_attn.{part}.weight"] = torch.zeros(shape)
    save_file(tensors, path, {"format": "pt"})
    assert count_bytes() == before
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("vocab_size_per_layer_input", 96, r"every token needs a row: at least vocab_size \(97\)"),
        ("num_kv_shared_layers", 4, "each kind of layer needs one before the last 4 of 5 layers"),
        ("num_kv_shared_layers", 5, "each kind of layer needs one before the last 5 of 5 layers"),
        ("per_layer_config", {"4": {"head_dim": 24}}, "other heads than layer"),
        ("enable_moe_block", True, "'num_experts'"),
        ("use_bidirectional_attention", "all", "by which text attends to earlier tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, field: str, value: object, problem: str) -> None:
    save_case(CASES["gemma4-e"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(tmp_path)
