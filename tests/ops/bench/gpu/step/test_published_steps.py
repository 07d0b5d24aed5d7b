"""Steps of models with experts, latent attention and recurrent layers, at tiny sizes on the CPU, and their floors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_worker.execution.memory.kv_cache import bytes_per_block
from gpu_worker.models.layer_memory import cache_layout
from ops.bench.gpu.case import OURS, OURS_ON_DEVICE
from ops.bench.gpu.cases.published_steps import published_checks
from ops.bench.gpu.published import (
    DEEPSEEK_V2_LITE,
    GPT_OSS_20B,
    PUBLISHED,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    PublishedShape,
)
from ops.bench.gpu.run import poisoned_memory
from ops.bench.gpu.step import published_correctness
from ops.bench.gpu.step.published_model import published_config, published_model
from ops.bench.gpu.step.published_steps import experts_read, published_decode_case, published_prefill_case
from ops.bench.gpu.step.step_engine import EngineSizes, StepEngine
from ops.bench.gpu.step.step_floor import num_active, step_floor

CPU = torch.device("cpu")
META = torch.device("meta")
CODES = "quantization_config"
_COMMON = {"hidden_size": 64, "vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def tiny(shape: PublishedShape, num_layers: int, **fields: Any) -> PublishedShape:
    return replace(
        shape, name=f"tiny {shape.name}", fields={**shape.fields, **_COMMON, **fields}, num_layers=num_layers
    )


TINY = {
    "moe": tiny(QWEN3_30B_A3B, 2, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3),
    "oss": tiny(GPT_OSS_20B, 2, intermediate_size=96, num_local_experts=6, num_experts_per_tok=2, sliding_window=7),
    "mla": tiny(
        DEEPSEEK_V2_LITE,
        3,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "next": tiny(
        QWEN3_NEXT_80B,
        4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
    ),
}
# A field of each whose change the check must notice.
WRONG: Mapping[str, dict[str, Any]] = {
    "moe": {"norm_topk_prob": False},
    "oss": {"sliding_window": 6},
    "mla": {"routed_scaling_factor": 1.1},
    "next": {"partial_rotary_factor": 0.5},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_right_model_passes_the_checks(name: str) -> None:
    with poisoned_memory():
        checks = [
            (check.label, check.measure(), check.tolerance) for check in published_checks(CPU, TINY[name], (41, 9))
        ]
    assert len(checks) == (3 if name == "oss" else 2)
    for label, error, tolerance in checks:
        assert error <= tolerance, f"{label}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_model_fails_the_check_of_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_model(shape: PublishedShape, *rest: Any, **options: Any) -> object:
        return published_model(replace(shape, fields={**shape.fields, **WRONG[name]}), *rest, **options)

    monkeypatch.setattr(published_correctness, "published_model", wrong_model)
    shape = TINY[name].first(2).without(CODES)
    assert published_correctness.logits_error(CPU, shape, (41, 9)) > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_candidate_of_decodes_and_prefills_runs(name: str) -> None:
    decode = published_decode_case(CPU, TINY[name], num_seqs=3, context=24, num_steps=8)
    assert decode.num_tokens == 3
    assert {OURS, OURS_ON_DEVICE, "eager"} == decode.candidates.keys()
    prefill = published_prefill_case(CPU, TINY[name], num_tokens=40, num_prompts=2)
    assert prefill.num_flops > 8 * decode.num_flops > 0
    for case in (decode, prefill):
        for call in case.candidates.values():
            assert call(0) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_floor_with_all_experts_read_is_every_parameter_and_all_that_is_kept(name: str) -> None:
    shape = TINY[name].without(CODES)
    model, weights = published_model(shape, 64, CPU, torch.float32, keeps_tensors=True)
    peer = published_correctness.RoutedPeer(shape, weights.tensors, CPU)
    parameters = sum(parameter.numel() for parameter in peer.model.parameters())
    num_experts = shape.fields.get("num_experts") or shape.fields.get("n_routed_experts", 6)
    mixtures = len(experts_read(model, lambda: None, 1))
    floor = step_floor(model.config, weights.sizes, [(1, 9), (1, 20)], [num_experts] * mixtures)
    kept = {
        "moe": 29 * 2 * 2 * 2 * 16 * 2,
        # One layer sees seven tokens of either sequence, the other all.
        "oss": (7 + 7 + 29) * 2 * 2 * 16 * 2,
        "mla": 29 * 3 * (32 + 8) * 2,
        # One layer of four attends; three convolutions and states are read and written.
        "next": 29 * 2 * 2 * 16 * 2 + 2 * 2 * 3 * (4 * 12 * 20 + 3 * (2 * 2 * 12 + 4 * 20)) * 4,
    }
    assert floor.num_bytes == 4 * (parameters - 300 * 64) + kept[name]


def test_floor_of_experts_is_their_share() -> None:
    config = published_config(TINY["moe"], 64)
    _, weights = published_model(TINY["moe"], 64, CPU)
    few, many = (step_floor(config, weights.sizes, [(1, 9)] * 5, [count, count]) for count in (3.0, 7.5))
    assert many.num_bytes - few.num_bytes == round(4.5 * 2 * 3 * 64 * 32 * 2)
    assert many.num_flops == few.num_flops
    # Matrices of attention, of the router and of three experts, in two layers; the head; and ten scores a head.
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 8 * 64 + 3 * 3 * 64 * 32) + 300 * 64
    assert many.num_flops == 5 * (2 * matrices + 2 * 4 * 9 * 4 * 16)


def test_read_experts_are_those_that_some_token_has() -> None:
    model, _ = published_model(TINY["moe"], 64, CPU)
    engine = StepEngine(model, EngineSizes(1, 64, has_graphs=False))
    engine.fill(1, 5)
    assert experts_read(model, engine.step, 3) == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        (QWEN3_30B_A3B, 30.5e9, 3.3e9),
        (GPT_OSS_20B, 20.9e9, 3.6e9),
        (DEEPSEEK_V2_LITE, 15.7e9, 2.4e9),
        (QWEN3_NEXT_80B, 80e9, 3e9),
    ],
    ids=lambda value: value.name if isinstance(value, PublishedShape) else "",
)
def test_published_shape_has_the_published_number_of_parameters(
    shape: PublishedShape, total: float, active: float
) -> None:
    whole = replace(shape, num_layers=shape.fields["num_hidden_layers"]).without(CODES)
    model, weights = published_model(whole, 64, META)
    numbers = sum(size.numbers for size in weights.sizes.values())
    assert numbers == pytest.approx(total, rel=0.01)
    # Published ones are rounded, and count the table of embeddings or not.
    assert num_active(model.config, weights.sizes) == pytest.approx(active, rel=0.2)
    fields = whole.config()
    config = published_correctness.transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    with META:
        peer = published_correctness.transformers.AutoModelForCausalLM.from_config(config)
    assert numbers == sum(parameter.numel() for parameter in peer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_measured_layers_leave_room_for_a_cache_of_256_sequences(shape: PublishedShape) -> None:
    model, weights = published_model(shape.without(CODES), 2048, META)
    assert model.config.num_layers == shape.num_layers
    tokens = 256 * 1440 * bytes_per_block(16, model.config, torch.bfloat16) // 16
    # Of the engine, and of the step that is timed by itself.
    states = 2 * 257 * cache_layout(model.config).state_bytes
    assert sum(size.num_bytes for size in weights.sizes.values()) + tokens + states < 60 * 2**30
