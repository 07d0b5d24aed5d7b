"""Families whose layers are not Llama's: rounded by their descriptions, under the names that their checkpoints have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import transformers

from gpu_worker.models.registry import read_model_config
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob, check_job
from ops.quantize.layer_blocks import unrounded_parts
from ops.quantize.methods import make_method
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, run
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import FACTORS
from tests.gpu_worker.models.wrapper_cases import WRAPPER_CASES, save_wrapper
from tests.ops.quantize.layer_models import SIZES, TOKENS, job_for, logits_of, save_model, tensors_of

_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}
_LATENT = {
    **_EXPERTS,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 1e-9,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
}
_GEMMA4_E = {
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 160,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "sliding_window": 9,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "pad_token_id": 0,
}
_GEMMA4_MOE = {
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_STACKED = {"save_original_format": False}
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gemma2": Case("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 3.0}),
        "gemma3": Case("Gemma3Text", {"sliding_window": 9}, model="Gemma3"),
        "gemma4-e": Case("Gemma4Text", _GEMMA4_E, model="Gemma4"),
        "gemma4-moe": Case("Gemma4Text", _GEMMA4_MOE, model="Gemma4"),
        "phi3": Case("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
        "glm4": Case("Glm4", {"attention_bias": True}),
        "olmo2": Case("Olmo2"),
        "apertus": Case("Apertus"),
        "gpt2": Case("GPT2"),
        "opt": Case("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0}),
        "afmoe": Case("Afmoe", {**_EXPERTS, "sliding_window": 9, "global_attn_every_n_layers": 2}),
        "hy-v3": Case("HYV3", _EXPERTS),
        "mimo-v2": Case("MiMoV2Flash", {**_EXPERTS, "n_routed_experts": 4, "head_dim": 24, "v_head_dim": 16}),
        "starcoder2": Case("Starcoder2", {"use_bias": True}),
        "stablelm-12b": Case("StableLm", {"qk_layernorm": True, "use_parallel_residual": True, "pad_token_id": 0}),
        "command-r-plus": Case("Cohere", {"use_qk_norm": True}),
        "cohere2": Case("Cohere2", {"sliding_window": 9}),
        "cohere2-moe": Case("Cohere2Moe", {**_EXPERTS, "num_shared_experts": 1, "sliding_window": 9}),
        "olmoe": Case("Olmoe", _EXPERTS),
        "glm4-moe": Case("Glm4Moe", {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
        "llama4": Case("Llama4Text", {**_EXPERTS, **_LLAMA4}, model="Llama4"),
        "granite-moe": Case("GraniteMoeShared", {**_EXPERTS, "shared_intermediate_size": 32}, saved=_STACKED),
        "phimoe": Case("Phimoe", {**_EXPERTS, "lm_head_bias": True}),
        "gpt-oss": Case("GptOss", {**_EXPERTS, "sliding_window": 9}),
        "deepseek-v2-lite": Case("DeepseekV2", {**_LATENT, "q_lora_rank": None}),
        "deepseek-v3": Case("DeepseekV3", {**_LATENT, "n_group": 1, "topk_group": 1}),
        "qwen3-next": Case("Qwen3Next", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}),
        "qwen3_5": Case("Qwen3_5Text", _DELTA, model="Qwen3_5"),
        "lfm2": Case("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
        "falcon-h1": Case("FalconH1", {**_MAMBA2, **FACTORS, "mamba_rms_norm": True}),
        "nemotron-h": Case("NemotronH", _NEMOTRON),
        "mamba2": Case("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}),
    }
)
# Of linear layers and convolutions that a state or a choice depends on.
_KEPT_GATES = ("kv_b_proj", "in_proj_ba", "in_proj_a", "in_proj_b", "latent_proj", "mlp.gate", "router")
_KEPT_INPUTS = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
KEPT = ("conv1d", "conv.conv", *_KEPT_GATES, *_KEPT_INPUTS)


def save(case: Case, directory: Path) -> None:
    save_model(directory)
    options = {**SIZES, "num_hidden_layers": 2, **case.options}
    save_case(Case(case.family, options, case.dtype, case.saved, case.model), directory)


def job_of(model: Path, method: str) -> QuantizeJob:
    return job_for(model, model.parent / f"out-{method}", method, samples=4)


def quantized(folder: Path, name: str, method: str) -> QuantizeJob:
    """Save a model of a family and round it."""
    save(CASES[name], folder / "model")
    job = job_of(folder / "model", method)
    list(quantize(job))
    return job


def middle_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the median of tokens' relative errors: of a few tokens rounding lets a router choose another expert."""
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("int8", 0.1), ("rtn-int4", 0.9), ("gptq", 0.9)])
@pytest.mark.parametrize("name", CASES)
def test_a_family_is_rounded_under_its_own_names(tmp_path: Path, name: str, method: str, most: float) -> None:
    job = quantized(tmp_path, name, method)
    assert 0 < middle_error(logits_of(job.out), logits_of(job.model)) < most
    before, after = tensors_of(job.model), tensors_of(job.out)
    kept = [name for name in before if name in after]
    assert all(torch.equal(before[name], after[name]) for name in kept if method != "int8" or after[name].dim() < 2)
    stays = [name for name in before if any(f"{part}.weight" in name for part in KEPT) and before[name].dim() > 1]
    assert all(torch.equal(before[name], after[name]) for name in stays)
    modules = {name.rpartition(".")[0] for name in after}
    gone = {name for name in before if name not in after and "experts" not in name and "linear" not in name}
    assert all(name.removesuffix(".weight") in modules for name in gone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt-oss", "deepseek-v3", "qwen3-next", "falcon-h1", "nemotron-h", "gemma4-e", "gemma4-moe"]
)
def test_rounded_models_are_served(tmp_path: Path, name: str) -> None:
    job = quantized(tmp_path, name, "rtn-int4")
    prompt = TOKENS[:13].tolist()
    runner = make_runner(job.out, max_model_len=48, dtype="float32")
    answer = run(runner, [make_sequence("0", prompt, Sampling(temperature=0.0, max_tokens=9))]).tokens["0"]
    tokens = torch.tensor([*prompt, *answer])
    logits = logits_of(job.out, tokens)
    assert answer == logits[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "modules"),
    [
        ("falcon-h1", ("mamba.in_proj", "mamba.out_proj", "self_attn.o_proj", "feed_forward.gate_proj")),
        ("cohere2-moe", ("mlp.shared_experts.down_proj", "mlp.shared_experts.gate_proj")),
    ],
)
def test_scaled_rows_are_stored_unscaled(tmp_path: Path, case: str, modules: tuple[str, ...]) -> None:
    job = quantized(tmp_path, case, "int8")
    before, after = tensors_of(job.model), tensors_of(job.out)
    for name in modules:
        weight = f"model.layers.0.{name}.weight"
        rounded = after[weight].float() * after[f"{weight}_scale"].float()
        assert float((rounded - before[weight]).norm() / before[weight].norm()) < 0.02


def test_output_features_that_fill_no_words_are_refused(tmp_path: Path) -> None:
    odd = {**_MAMBA2, "mamba_n_heads": 4, "mamba_d_head": 16}
    save(Case("FalconH1", odd), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"HEADRACE_METHOD.*mamba\.in_proj of layer 0 has 196; use rtn-int4"):
        next(quantize(job_of(tmp_path / "model", "gptq")))


@pytest.mark.parametrize(("vocab_size", "multiple"), [(514, 4), (516, None)])
def test_head_that_fills_no_words_is_refused(tmp_path: Path, vocab_size: int, multiple: int | None) -> None:
    save_model(tmp_path / "model", tie_word_embeddings=False)
    config = replace(read_model_config(tmp_path / "model"), vocab_size=vocab_size)
    job = replace(job_of(tmp_path / "model", "gptq"), lm_head=True)
    refusal = pytest.raises(ConfigError, match=rf"HEADRACE_LM_HEAD.*of {multiple} output.*head has {vocab_size}")
    with contextlib.nullcontext() if multiple is None else refusal:
        check_job(config, job, make_method("gptq", 32))
    check_job(config, replace(job, method="int8"), make_method("int8", 32))


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("gemma2", ["normalisations"]),
        ("deepseek-v3", ["normalisations", "routers", "kv_b_proj"]),
        ("qwen3_5", ["normalisations", "convolutions", "decays and steps of states", "in_proj_b", "in_proj_a"]),
        ("lfm2", ["normalisations", "convolutions"]),
        ("gemma4-moe", ["normalisations", "routers"]),
        (
            "gemma4-e",
            ["normalisations", "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"],
        ),
    ],
)
def test_what_stays_is_told_by_name(tmp_path: Path, name: str, stays: list[str]) -> None:
    case = CASES[name]
    config = getattr(transformers, f"{case.family}Config")(**{**SIZES, "num_hidden_layers": 2, **case.options})
    config.architectures = [f"{case.model or case.family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert unrounded_parts(read_model_config(tmp_path)) == stays


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 2})
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"\(BertModel\) has attention in both directions; serve it in its own"):
        next(quantize(job_of(tmp_path / "model", "int8")))


@pytest.mark.slow
def test_a_tower_stays_and_its_modules_are_ignored(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_wrapper(WRAPPER_CASES["qwen3-vl"], model)
    job = job_of(model, "int8")
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
