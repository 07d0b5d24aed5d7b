"""Models with experts: each is rounded by the tokens routed to it, and the checkpoint is read by the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from gpu_worker.layers.layer_source import QuantizedLayers
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.registry import read_model_config
from ops.quantize.job import quantize
from ops.quantize.layer_blocks import mixture_of
from tests.ops.quantize.layer_models import CPU, SIZES, job_for, logits_of, save_model, tensors_of

NUM_EXPERTS = 6


def save_mixture(directory: Path, family: str, **options: Any) -> None:
    """Save a random model with experts, with the tokenizer of the dense ones."""
    save_model(directory)
    torch.manual_seed(5)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    if family == "Mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS, **options))
    else:
        shared = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": NUM_EXPERTS}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **shared, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.1)
    model.eval().save_pretrained(directory)


@pytest.fixture(scope="module", params=["Mixtral", "Qwen2Moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_mixture(directory, request.param)
    return directory


def experts_of(directory: Path) -> list[torch.Tensor]:
    """Both matrices of all experts of all layers, as the engine reads them."""
    config = read_model_config(directory)
    with Checkpoint(directory, torch.float32, CPU) as source:
        quantized = None if config.quantization is None else QuantizedLayers(config.quantization, source)
        layers = config.layer_source(source, quantized)
        mixtures = [mixture_of(config.take_layer(layers, index)) for index in range(config.num_layers)]
        return [
            torch.stack([form.dequantize() for form in experts.forms])
            for mixture in mixtures
            for experts in (mixture.gate_up, mixture.down)
        ]


@pytest.mark.parametrize(("method", "most"), [("int8", 0.01), ("fp8", 0.04), ("rtn-int4", 0.15), ("gptq", 0.25)])
def test_quantized_experts_are_near_the_model_s(model: Path, tmp_path: Path, method: str, most: float) -> None:
    advances = list(quantize(job_for(model, tmp_path / "out", method)))
    shared = 2 if "Qwen2" in model.name else 0
    assert advances[-1].done == advances[-1].total == 2 * (2 + 2 * NUM_EXPERTS + shared)
    for expected, actual in zip(experts_of(model), experts_of(tmp_path / "out"), strict=True):
        assert 0 < float((actual - expected).norm() / expected.norm()) < most
    # Rounding makes some tokens choose other experts, so that answers are less alike than matrices are.
    expected, actual = logits_of(model), logits_of(tmp_path / "out")
    assert 0 < float((actual - expected).norm() / expected.norm()) < 0.7
    routers = [tensor for name, tensor in tensors_of(tmp_path / "out").items() if name.endswith(".gate.weight")]
    assert len(routers) == 2
    assert all(router.is_floating_point() and router.itemsize > 1 for router in routers)


def test_experts_that_calibration_never_reaches_are_reported_and_rounded(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "Mixtral")
    short = replace(job_for(tmp_path / "model", tmp_path / "out", "gptq"), samples=1, window=2)
    unseen = [advance.name for advance in quantize(short) if advance.is_unseen]
    # Two tokens reach four of the six experts at most, in each of two layers.
    assert len(unseen) >= 2 * 2 * 2
    assert all("experts." in name for name in unseen)
    for expected, actual in zip(experts_of(tmp_path / "model"), experts_of(tmp_path / "out"), strict=True):
        # Unseen experts must not become zero either.
        assert ((actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max() < 0.6
