"""The floors of steps, and the sizes of the published models that they are taken of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.execution.memory.kv_cache import bytes_per_block
from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.ranks.division import Division, divided_layer
from ops.bench.gpu.shapes import (
    DEEPSEEK_V2_LITE,
    GPT_OSS_20B,
    LLAMA3_8B,
    LLAMA3_70B_TP8,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    ModelShape,
)
from ops.bench.gpu.step.random_model import model_config, random_model
from ops.bench.gpu.step.step_engine import StepEngine
from ops.bench.gpu.step.step_floor import _flops_of, step_floor
from ops.bench.gpu.step.steps import experts_read
from ops.bench.gpu.step.transformers_peer import RoutedPeer, TransformersPeer, transformers
from tests.ops.bench.gpu.step.tiny_models import CODES, CPU, DENSE, OTHER

META = torch.device("meta")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_floor_of_a_window_counts_the_tokens_that_it_shows() -> None:
    seen = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
    windowed = replace(seen, sliding_window=4)
    # The last two of ten tokens.
    assert [_flops_of(each, [(2, 10)]) for each in (seen, windowed)] == [4 * (9 + 10) * 4 * 16, 4 * (4 + 4) * 4 * 16]


def test_two_layers_to_check_are_of_both_kinds() -> None:
    layers = model_config(QWEN3_NEXT_80B.first(2), 64).layers
    assert [type(layer.mixer) for layer in layers] == [GatedDeltaShape, AttentionShape]


@pytest.mark.parametrize("name", [*DENSE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER)])
def test_floor_with_all_experts_read_is_every_parameter_and_all_that_is_kept(name: str) -> None:
    shape = (DENSE | OTHER)[name].without(CODES)
    model, weights = random_model(shape, 64, CPU, torch.float32, keeps_tensors=True)
    peer = (TransformersPeer if shape.is_dense else RoutedPeer)(shape, weights.tensors, CPU)
    parameters = sum(parameter.numel() for parameter in peer.model.parameters())
    num_experts = shape.fields.get("num_experts") or shape.fields.get("n_routed_experts", 6)
    mixtures = len(experts_read(model, lambda: None, 1))
    floor = step_floor(model.config, weights.sizes, [(1, 9), (1, 20)], [num_experts] * mixtures)
    attending = 29 * 2 * 2 * 2 * 16 * 2
    kept = {
        "qwen": attending,
        "llama": attending,
        "moe": attending,
        # One layer sees seven tokens of either sequence, the other all.
        "oss": (7 + 7 + 29) * 2 * 2 * 16 * 2,
        "mla": 29 * 3 * (32 + 8) * 2,
        # One layer of four attends; three convolutions and states are read and written.
        "next": 29 * 2 * 2 * 16 * 2 + 2 * 2 * 3 * (4 * 12 * 20 + 3 * (2 * 2 * 12 + 4 * 20)) * 4,
    }
    looked_up = 0 if model.config.tie_word_embeddings else 300 * 64
    assert floor.num_bytes == 4 * (parameters - looked_up) + kept[name]


def test_floor_of_experts_is_their_share() -> None:
    config = model_config(OTHER["moe"], 64)
    _, weights = random_model(OTHER["moe"], 64, CPU)
    few, many = (step_floor(config, weights.sizes, [(1, 9)] * 5, [count, count]) for count in (3.0, 7.5))
    assert many.num_bytes - few.num_bytes == round(4.5 * 2 * 3 * 64 * 32 * 2)
    assert many.num_flops == few.num_flops
    # Matrices of attention, of the router and of three experts, in two layers; the head; and ten scores a head.
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 8 * 64 + 3 * 3 * 64 * 32) + 300 * 64
    assert many.num_flops == 5 * (2 * matrices + 2 * 4 * 9 * 4 * 16)


@pytest.mark.parametrize("name", DENSE)
def test_prompt_multiplies_every_matrix_for_each_token_and_the_head_once(name: str) -> None:
    model, weights = random_model(DENSE[name], 64, CPU)
    layers = sum(rows * columns for rows, columns in DENSE[name].projections.values())
    pairs = 40 * 41 // 2
    expected = 2 * (40 * 2 * layers + 300 * 64) + 4 * pairs * 2 * 4 * 16
    assert step_floor(model.config, weights.sizes, [(40, 40)]).num_flops == expected


def test_read_experts_are_those_that_some_token_has() -> None:
    model, _ = random_model(OTHER["moe"], 64, CPU)
    engine = StepEngine(model, 1, 64, has_graphs=False)
    engine.fill(1, 5)
    assert experts_read(model, engine.step, 3) == [3.0, 3.0]


def test_shard_is_what_one_of_several_ranks_has() -> None:
    published = ModelShape.published("Llama-3-70B")
    whole, shard = model_config(published, 64), model_config(LLAMA3_70B_TP8, 64)
    assert [layer.mixer for layer in shard.layers] == [
        divided_layer(layer, Division(0, 8)).mixer for layer in whole.layers
    ]
    numbers = [
        sum(size.numbers for size in random_model(shape.first(2), 64, META)[1].sizes.values())
        for shape in (published, LLAMA3_70B_TP8)
    ]
    # All but the normalisations is divided.
    assert numbers[1] - 5 * 8192 == (numbers[0] - 5 * 8192) / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        (LLAMA3_8B, 8.03e9, 7.5e9),
        (QWEN3_30B_A3B, 30.5e9, 3.3e9),
        (GPT_OSS_20B, 20.9e9, 3.6e9),
        (DEEPSEEK_V2_LITE, 15.7e9, 2.4e9),
        (QWEN3_NEXT_80B, 80e9, 3e9),
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else "",
)
def test_published_shape_has_the_published_number_of_parameters(shape: ModelShape, total: float, active: float) -> None:
    whole = replace(shape, num_layers=shape.fields["num_hidden_layers"]).without(CODES)
    model, weights = random_model(whole, 64, META)
    numbers = sum(size.numbers for size in weights.sizes.values())
    assert numbers == pytest.approx(total, rel=0.01)
    # Published ones are rounded, and count the table of embeddings or not.
    mixtures = sum(isinstance(layer.feed_forward, MixtureShape) for layer in model.config.layers)
    with_weights, without = (
        step_floor(model.config, sizes, [(1, 1)], [1.0] * mixtures).num_flops for sizes in (weights.sizes, {})
    )
    assert (with_weights - without) / 2 == pytest.approx(active, rel=0.2)
    fields = whole.config()
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    with META:
        peer = transformers.AutoModelForCausalLM.from_config(config)
    assert numbers == sum(parameter.numel() for parameter in peer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [QWEN3_30B_A3B, GPT_OSS_20B, DEEPSEEK_V2_LITE, QWEN3_NEXT_80B], ids=lambda shape: shape.name
)
def test_measured_layers_leave_room_for_a_cache_of_256_sequences(shape: ModelShape) -> None:
    model, weights = random_model(shape.without(CODES), 2048, META)
    assert model.config.num_layers == shape.num_layers
    tokens = 256 * 1440 * bytes_per_block(16, model.config, torch.bfloat16) // 16
    # Of the engine, and of the step that is timed by itself.
    states = 2 * 257 * model.config.cache_layout.state_bytes
    assert sum(size.num_bytes for size in weights.sizes.values()) + tokens + states < 60 * 2**30
