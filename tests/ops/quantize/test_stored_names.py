"""Names of kept and of rounded tensors, as the checkpoint has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.models.checkpoint import Checkpoint
from ops.quantize.folder import StoredNames, read_all
from tests.gpu_worker.models.support_page import sample_config

LFM2, GEMMA3, MIXTRAL = map(sample_config, ("Lfm2ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"))

SEEING = (
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.self_attn.q_proj.weight",
    "model.language_model.layers.0.input_layernorm.weight",
    "model.language_model.layers.1.self_attn.q_proj.weight",
    "model.language_model.norm.weight",
    "model.vision_tower.layers.0.mlp.fc1.weight",
    "model.vision_tower.layers.0.mlp.fc1.bias",
    "model.vision_tower.norm.weight",
)
ROUTED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "model.layers.0.block_sparse_moe.experts.1.w1.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "lm_head.weight",
)


def test_renamed_module_is_found_by_its_own_name() -> None:
    names = StoredNames(["model.layers.3.self_attn.out_proj.weight", "model.norm.weight"], LFM2)
    assert names.module("model.layers.3.self_attn.o_proj") == "model.layers.3.self_attn.out_proj"


@pytest.mark.parametrize(
    ("own", "stored"),
    [
        ("model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("model.layers.1.mlp.experts.7.up_proj", "model.language_model.layers.1.mlp.experts.7.up_proj"),
        ("lm_head", "lm_head"),
    ],
    ids=["there", "absent", "outside"],
)
def test_module_below_the_text_part_keeps_that_parts_name(own: str, stored: str) -> None:
    assert StoredNames(SEEING, GEMMA3).module(own) == stored


def test_layer_keeps_what_is_neither_rounded_nor_another_layers() -> None:
    names = StoredNames(SEEING, GEMMA3)
    assert names.of_layer(0, ["model.layers.0.self_attn.q_proj"]) == [SEEING[2]]
    assert names.of_layer(1, []) == [SEEING[3]]


def test_experts_are_not_kept_but_their_router_is() -> None:
    names = StoredNames(ROUTED, MIXTRAL)
    assert names.of_layer(0, ["model.layers.0.self_attn.q_proj"]) == [ROUTED[1], ROUTED[4]]


@pytest.mark.parametrize(("has_head", "kept"), [(True, []), (False, ["lm_head.weight"])])
def test_head_is_kept_unless_it_is_rounded(has_head: bool, kept: list[str]) -> None:
    assert StoredNames(ROUTED, MIXTRAL).outside_layers(has_head=has_head) == kept


def test_layers_beyond_the_model_s_are_outside_of_it() -> None:
    beyond = f"model.layers.{MIXTRAL.num_layers}.eh_proj.weight"
    names = StoredNames([*ROUTED, beyond], MIXTRAL)
    assert names.outside_layers(has_head=True) == [beyond]


def test_matrices_of_unused_towers_are_left_alone_and_all_tensors_are_read_as_stored(tmp_path: Path) -> None:
    tensors = {
        name: torch.full((2, 3) if "fc1.weight" in name or "proj" in name else (3,), index, dtype=torch.float16)
        for index, name in enumerate(SEEING)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    names = StoredNames(SEEING, GEMMA3)
    with Checkpoint(tmp_path, torch.float32, torch.device("cpu")) as checkpoint:
        assert names.left_alone(checkpoint) == ["model.vision_tower.layers.0.mlp.fc1"]
        kept = names.outside_layers(has_head=False)
        assert kept == [SEEING[0], *SEEING[4:]]
        read = read_all(checkpoint, kept)
    assert list(read) == kept
    for name, tensor in read.items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, tensors[name])
