"""Quantized experts against `transformers` on the dense weights that they stand for.

Greedy answers of the whole engine on quantized checkpoints, against the oracle's on the dense weights.

Float8 experts in one tensor a layer, as `transformers` has them, against the same in tensors of their own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, run
from tests.gpu_worker.quantization.checkpoints import (
    Made,
    Pack,
    assert_equals_oracle,
    but_head,
    logits_of,
    make_checkpoint,
)
from tests.gpu_worker.quantization.packers import (
    FP8_MAX,
    PackedLayer,
    awq,
    ct_packed,
    fp8,
    fp8_blocks,
    gptq,
    in_order,
    int8,
    shuffled,
)
from tests.gpu_worker.quantization.test_compressed_tensors import INT4, config, group

SIZES: dict[str, Any] = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True, "eos_token_id": None,
}  # fmt: skip
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def per_tensor(weight: torch.Tensor) -> PackedLayer:
    return fp8(weight, weight.abs().max() / FP8_MAX)


def experts_alone(pack: Pack) -> Pack:
    """Leave alone whatever is outside of experts."""
    return lambda name, weight: pack(name, weight) if ".experts." in name else None


def score_left_alone(pack: Pack) -> Pack:
    """Leave alone the score of the shared expert, a matrix of one row, as tools do."""
    return lambda name, weight: None if name.endswith("shared_expert_gate") else pack(name, weight)


FP8_CHANNEL = group({"num_bits": 8, "type": "float", "strategy": "channel"})
FP8_TENSOR = group({"num_bits": 8, "type": "float", "strategy": "tensor"})
IGNORED = {"ignore": ["lm_head", "re:.*shared_expert_gate"]}

METHODS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        but_head(lambda w: gptq(w, 4, in_order(w.shape[1], 32), symmetric=False)),
    ),
    "gptq with act-order, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": True},
        but_head(lambda w: gptq(w, 8, shuffled(w.shape[1], 32, 1))),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, but_head(lambda w: awq(w, 32))),
    "awq of experts alone": (
        {"quant_method": "awq", "bits": 4, "group_size": 32}, experts_alone(but_head(lambda w: awq(w, 32))),
    ),
    "compressed-tensors, 4 bits": (
        config("pack-quantized", INT4, **IGNORED),
        but_head(lambda w: ct_packed(w, 4, in_order(w.shape[1], 32), symmetric=True)),
    ),
    "compressed-tensors, int8": (
        config("int-quantized", group({"num_bits": 8, "strategy": "channel"}), **IGNORED), but_head(int8),
    ),
    "fp8, a scale a tensor": (config("float-quantized", FP8_TENSOR, **IGNORED), but_head(per_tensor)),
    "fp8, a scale a channel": (
        config("float-quantized", FP8_CHANNEL, **IGNORED),
        but_head(lambda w: fp8(w, w.abs().amax(dim=1, keepdim=True) / FP8_MAX)),
    ),
    "fp8, blocks": (
        config("float-quantized", group(BLOCKS), **IGNORED), but_head(lambda w: fp8_blocks(w, name="weight_scale")),
    ),
}  # fmt: skip


def make(directory: Path, name: str, **options: Any) -> Made:
    fields, pack = METHODS[name]
    return make_checkpoint(directory, fields, score_left_alone(pack), "Qwen2Moe", **SIZES, **options)


@pytest.mark.parametrize("name", METHODS)
def test_quantized_experts_equal_the_oracle(tmp_path: Path, name: str) -> None:
    assert_equals_oracle(make(tmp_path, name))


def test_blocks_that_gates_and_ups_share_equal_the_oracle(tmp_path: Path) -> None:
    """Where blocks of gates end inside of a block, the two cannot be one matrix."""
    assert_equals_oracle(make(tmp_path, "fp8, blocks", hidden_size=160, head_dim=64))


def test_an_expert_without_scales_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    assert "has no tensor" in make(tmp_path, "fp8, a scale a channel").refusal_with(name, None)


PROMPTS = [[5, 9, 33, 2, 71], list(range(20, 60)), [8]]
NUM_TOKENS = 16

CHECKPOINTS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq with act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        lambda _, w: gptq(w, 4, shuffled(w.shape[1], 32, 1), symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, but_head(lambda w: awq(w, 16))),
    "compressed-tensors": (
        config("pack-quantized", INT4),
        but_head(lambda w: ct_packed(w, 4, in_order(w.shape[1], 32), symmetric=True)),
    ),
    "fp8 blocks": (
        config(
            "float-quantized",
            group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
        ),
        but_head(lambda w: fp8_blocks(w, name="weight_scale")),
    ),
}


def oracle_tokens(oracle: Any, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def assert_answers_equal(directory: Path, oracle: Any, **settings: Any) -> None:
    """Let the engine answer the prompts, which arrive one a step."""
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sequences = [make_sequence(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    runner = make_runner(directory, max_model_len=100, **settings)
    outcome = run(runner, sequences, token_budget=16, arrivals_per_step=1)
    assert outcome.tokens == {str(i): oracle_tokens(oracle, prompt) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_answers_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    fields, pack = CHECKPOINTS[name]
    made = make_checkpoint(tmp_path, fields, pack, eos_token_id=None)
    assert_answers_equal(tmp_path, made.oracle)


NUM_EXPERTS = 3
STACKED_SIZES: dict[str, Any] = {
    "hidden_size": 160, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
    # A multiple of a block, so that blocks of gates and of ups are those of both as one matrix.
    "moe_intermediate_size": 128, "norm_topk_prob": True, "head_dim": 16, "eos_token_id": None,
}  # fmt: skip
STACKED_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
EXPERTS = "model.layers.{layer}.mlp.experts"


def powers_of_two(weight: torch.Tensor) -> PackedLayer:
    """Blocks whose scales are rounded up to exponents, as DeepSeek V3.1's are."""
    scales = fp8_blocks(weight).tensors["weight_scale_inv"].log2().ceil().exp2()
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / whole).to(torch.float8_e4m3fn)
    return PackedLayer({"weight": values, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}, values.float() * whole)


def stacked_per_tensor(weight: torch.Tensor) -> PackedLayer:
    # Two matrices can share a scale only if it is the same for all.
    return fp8(weight, torch.tensor(8 / FP8_MAX), name="weight_scale_inv")


def static(weight: torch.Tensor) -> PackedLayer:
    layer = stacked_per_tensor(weight)
    return PackedLayer({**layer.tensors, "activation_scale": torch.tensor(0.03)}, layer.dense)


KINDS = {
    "blocks": (STACKED_BLOCKS, fp8_blocks),
    "blocks, powers of two": (STACKED_BLOCKS, powers_of_two),
    "a scale a tensor": ({"quant_method": "fp8"}, stacked_per_tensor),
    "a scale a tensor, static": ({"quant_method": "fp8", "activation_scheme": "static"}, static),
}


def stacked_make(directory: Path, kind: str, **sizes: int) -> Made:
    fields, pack = KINDS[kind]
    every = STACKED_SIZES | sizes
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
    made = stacked_make(tmp_path, kind, hidden_size=hidden_size)
    expected = logits_of(made.load())
    made.change_tensors(stack)
    assert torch.equal(logits_of(made.load()), expected)


def test_stacked_experts_may_be_turned_round(tmp_path: Path) -> None:
    made = stacked_make(tmp_path, "blocks")
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
    made = stacked_make(tmp_path, "blocks")
    made.change_tensors(stack)
    name = f"{EXPERTS.format(layer=1)}.gate_up_proj{end}"
    made.change_tensors(lambda tensors: tensors.update({name: tensor}))
    refusal = made.refusal()
    assert re.search(problem, refusal), refusal
    assert repr(name) in refusal
