"""Families whose layers are not Llama's: rounded by their descriptions, under the names that their checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.loader import load_model
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob
from shared.errors import ConfigError
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.test_text_part import SLOW_MODELS
from tests.gpu_worker.models.test_text_part import save as save_model_that_sees
from tests.ops.quantize.layer_models import SIZES, TEXT, save_model

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 43)
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_STACKED = {"save_original_format": False}
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gemma2": Case("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 3.0}),
        "gemma3": Case("Gemma3Text", {"sliding_window": 9}, model="Gemma3"),
        "phi3": Case("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
        "glm4": Case("Glm4", {"attention_bias": True}),
        "olmo2": Case("Olmo2"),
        "starcoder2": Case("Starcoder2", {"use_bias": True}),
        "cohere2": Case("Cohere2", {"sliding_window": 9}),
        "olmoe": Case("Olmoe", _EXPERTS),
        "glm4-moe": Case("Glm4Moe", {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
        "llama4": Case("Llama4Text", {**_EXPERTS, **_LLAMA4}, model="Llama4"),
        "granite-moe": Case("GraniteMoeShared", {**_EXPERTS, "shared_intermediate_size": 32}, saved=_STACKED),
        "phimoe": Case("Phimoe", {**_EXPERTS, "lm_head_bias": True}),
    }
)
REFUSED: Mapping[str, tuple[Case, str]] = MappingProxyType(
    {
        "gpt-oss": (Case("GptOss", _EXPERTS), r"GptOssForCausalLM\) has experts with biases"),
        "deepseek": (
            Case("DeepseekV3", {**_EXPERTS, **_LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
            "latent vectors",
        ),
        "lfm2": (Case("Lfm2", {"layer_types": ["conv", "full_attention"]}), "no attention"),
    }
)


def save(case: Case, directory: Path) -> None:
    """Save a model of a family, with a tokenizer."""
    save_model(directory)
    options = {**SIZES, "num_hidden_layers": 2, **case.options}
    save_case(Case(case.family, options, case.dtype, case.saved, case.model), directory)
    (directory / "text.txt").write_text(TEXT)


def job_for(model: Path, method: str) -> QuantizeJob:
    out = model.parent / f"out-{method}"
    return QuantizeJob(model, out, method, 32, model / "text.txt", samples=4, window=32, device="cpu")


def logits_of(directory: Path) -> torch.Tensor:
    return PagedRun(load_model(directory, torch.float32, CPU), [TOKENS]).step({0: len(TOKENS)})[0]


def tensors_of(directory: Path) -> dict[str, Any]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("int8", 0.1), ("rtn-int4", 0.9), ("gptq", 0.9)])
@pytest.mark.parametrize("name", CASES)
def test_a_family_is_rounded_under_its_own_names(tmp_path: Path, name: str, method: str, most: float) -> None:
    model = tmp_path / "model"
    save(CASES[name], model)
    job = job_for(model, method)
    list(quantize(job))
    expected, actual = logits_of(model), logits_of(job.out)
    assert 0 < float((actual - expected).norm() / expected.norm()) < most
    before, after = tensors_of(model), tensors_of(job.out)
    kept = [name for name in before if name in after]
    assert all(torch.equal(before[name], after[name]) for name in kept if method != "int8" or after[name].dim() < 2)
    modules = {name.rpartition(".")[0] for name in after}
    gone = {name for name in before if name not in after and "experts" not in name and "linear" not in name}
    assert all(name.removesuffix(".weight") in modules for name in gone)


@pytest.mark.slow
def test_interrupted_job_on_renamed_layers_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(CASES["llama4"], model)
    job = job_for(model, "gptq")
    begun = quantize(job)
    while "layer 1" not in next(begun).name:
        pass
    begun.close()
    assert "done before" in next(quantize(job)).name
    list(quantize(job))
    whole = job_for(tmp_path / "model", "gptq")
    other = QuantizeJob(model, tmp_path / "whole", *(getattr(whole, name) for name in FIELDS))
    list(quantize(other))
    torch.testing.assert_close(logits_of(job.out), logits_of(other.out), rtol=0, atol=0)


FIELDS = ("method", "group_size", "calibration", "samples", "window", "device")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rounded_is_refused_by_name(tmp_path: Path, name: str) -> None:
    case, problem = REFUSED[name]
    save(case, tmp_path / "model")
    with pytest.raises(ConfigError, match=problem):
        next(quantize(job_for(tmp_path / "model", "int8")))


@pytest.mark.parametrize(
    ("case", "reason"),
    [(CASES["phi3"], "only layers like Llama's"), (Case("Ernie4_5"), "only heads that turn whole, by halves")],
)
def test_awq_of_other_layers_than_llama_s_is_refused(tmp_path: Path, case: Case, reason: str) -> None:
    save(case, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"HEADRACE_METHOD.*{reason}.*gptq"):
        next(quantize(job_for(tmp_path / "model", "awq")))


@pytest.mark.slow
def test_a_tower_stays_and_its_modules_are_ignored(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model_that_sees("Qwen3VL", model, **SLOW_MODELS["Qwen3VL"])
    job = job_for(model, "int8")
    list(quantize(job))
    before, after = tensors_of(model), tensors_of(job.out)
    tower = [name for name in before if "visual" in name]
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert "model.language_model.layers.0.mlp.down_proj.weight_scale" in after
    ignored = json.loads((job.out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.rpartition(".")[0] for name in tower if before[name].dim() > 1} - set(ignored) <= {""}
    expected, actual = logits_of(model), logits_of(job.out)
    assert 0 < float((actual - expected).norm() / expected.norm()) < 0.1
