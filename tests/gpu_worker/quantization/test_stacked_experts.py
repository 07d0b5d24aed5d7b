"""Float8 experts in one tensor a layer, as `transformers` has them, against the same in tensors of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.quantization.checkpoints import Made, logits_of, make_checkpoint
from tests.gpu_worker.quantization.packers import FP8_MAX, PackedLayer, fp8, fp8_blocks

NUM_EXPERTS = 3
SIZES: dict[str, Any] = {
    "hidden_size": 160, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
    # A multiple of a block, so that blocks of gates and of ups are those of both as one matrix.
    "moe_intermediate_size": 128, "norm_topk_prob": True, "head_dim": 16, "eos_token_id": None,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
EXPERTS = "model.layers.{layer}.mlp.experts"


def powers_of_two(weight: torch.Tensor) -> PackedLayer:
    """Blocks whose scales are rounded up to exponents, as DeepSeek V3.1's are."""
    scales = fp8_blocks(weight).tensors["weight_scale_inv"].log2().ceil().exp2()
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / whole).to(torch.float8_e4m3fn)
    return PackedLayer({"weight": values, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}, values.float() * whole)


def per_tensor(weight: torch.Tensor) -> PackedLayer:
    # Two matrices can share a scale only if it is the same for all.
    return fp8(weight, torch.tensor(8 / FP8_MAX), name="weight_scale_inv")


def static(weight: torch.Tensor) -> PackedLayer:
    layer = per_tensor(weight)
    return PackedLayer({**layer.tensors, "activation_scale": torch.tensor(0.03)}, layer.dense)


KINDS = {
    "blocks": (BLOCKS, fp8_blocks),
    "blocks, powers of two": (BLOCKS, powers_of_two),
    "a scale a tensor": ({"quant_method": "fp8"}, per_tensor),
    "a scale a tensor, static": ({"quant_method": "fp8", "activation_scheme": "static"}, static),
}


def make(directory: Path, kind: str, **sizes: int) -> Made:
    fields, pack = KINDS[kind]
    every = SIZES | sizes
    return make_checkpoint(
        directory, fields, lambda name, weight: pack(weight) if ".experts." in name else None, "Qwen3Moe", **every
    )


def stack(tensors: dict[str, torch.Tensor], *, is_turned: bool = False) -> None:
    """Put the experts of each layer into one tensor."""
    for layer in range(2):
        root = EXPERTS.format(layer=layer)
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for end, stored in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
                found = [[tensors.pop(f"{root}.{e}.{part}.{stored}") for part in parts] for e in range(NUM_EXPERTS)]
                whole = torch.stack([torch.cat(own) if own[0].dim() else own[0] for own in found])
                turned = whole.transpose(1, 2).contiguous() if is_turned else whole
                tensors[f"{root}.{name}{end}"] = turned.view(-1, 1, 1) if turned.dim() == 1 else turned
            scale = f"{parts[-1]}.activation_scale"
            found_scales = [tensors.pop(f"{root}.{e}.{scale}", None) for e in range(NUM_EXPERTS)]
            if found_scales[0] is not None:
                tensors[f"{root}.{name}_activation_scale"] = torch.stack([s for s in found_scales if s is not None])
        for expert in range(NUM_EXPERTS):
            tensors.pop(f"{root}.{expert}.gate_proj.activation_scale", None)


# Of square matrices the shape does not tell whether they are turned: they are not.
@pytest.mark.parametrize(("kind", "hidden_size"), [*((kind, 160) for kind in KINDS), ("blocks", 128)])
def test_stacked_experts_are_those_with_tensors_of_their_own(tmp_path: Path, kind: str, hidden_size: int) -> None:
    made = make(tmp_path, kind, hidden_size=hidden_size)
    expected = logits_of(made.load())
    made.change_tensors(stack)
    assert torch.equal(logits_of(made.load()), expected)


def test_stacked_experts_may_be_turned_round(tmp_path: Path) -> None:
    made = make(tmp_path, "blocks")
    expected = logits_of(made.load())
    made.change_tensors(lambda tensors: stack(tensors, is_turned=True))
    assert torch.equal(logits_of(made.load()), expected)


@pytest.mark.parametrize(
    ("end", "tensor", "problem"),
    [
        ("", torch.zeros(NUM_EXPERTS, 256, 96).to(torch.float8_e4m3fn), r"config.json calls for \[3, 256, 160\]"),
        ("", torch.zeros(NUM_EXPERTS, 256, 160), "its quantization needs torch.float8_e4m3fn"),
        ("_scale_inv", torch.ones(2, 2, 2), "it must begin with 3"),
        ("_scale_inv", torch.ones(NUM_EXPERTS, 1, 2), r"config.json calls for \[2, 2\]"),
        ("_scale_inv", torch.full((NUM_EXPERTS, 2, 2), torch.nan), "not finite"),
    ],
)
def test_a_damaged_stack_is_refused_by_name(tmp_path: Path, end: str, tensor: torch.Tensor, problem: str) -> None:
    made = make(tmp_path, "blocks")
    made.change_tensors(stack)
    name = f"{EXPERTS.format(layer=1)}.gate_up_proj{end}"
    made.change_tensors(lambda tensors: tensors.update({name: tensor}))
    refusal = made.refusal()
    assert re.search(problem, refusal), refusal
    assert repr(name) in refusal
