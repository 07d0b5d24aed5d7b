"""Logits of GGUF files of more families against `transformers` with the numbers that the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu_worker.quantization.gguf.converted import GEMMA3, GRANITE, HALF, PLAIN, WINDOW, YARN
from tests.gpu_worker.quantization.gguf.family_files import FamilyFile, write_family
from tests.gpu_worker.quantization.gguf.layout_files import CASES, write_layout
from tests.gpu_worker.quantization.gguf.written_file import assert_file_equals

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.2],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
}
_V2 = {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
_V3 = {**_LATENT, "q_lora_rank": 64, "n_group": 4, "topk_group": 2}
_GLM_MOE = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": HALF,
}
_GRANITE = {**GRANITE, "rope_parameters": PLAIN}
_LAYERS = {"num_hidden_layers": 5}

FILES = {
    "gemma": FamilyFile("Gemma", "gemma", {"head_dim": 16}),
    "gemma2": FamilyFile("Gemma2", "gemma2", {**WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}),
    "gemma3": FamilyFile("Gemma3Text", "gemma3", GEMMA3),
    "phi3": FamilyFile("Phi3", "phi3", {"rope_parameters": PLAIN}),
    "phi3-window": FamilyFile("Phi3", "phi3", {"sliding_window": 8, "rope_parameters": PLAIN}),
    "phi3-longrope": FamilyFile("Phi3", "phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "glm4moe": FamilyFile("Glm4Moe", "glm4moe", _GLM_MOE, num_drafting=1),
    "deepseek2": FamilyFile("DeepseekV2", "deepseek2", _V2),
    "deepseek2-whole": FamilyFile("DeepseekV2", "deepseek2", {**_V2, "q_lora_rank": 64}, whole_up=True),
    "deepseek2-v3": FamilyFile("DeepseekV3", "deepseek2", _V3),
    "olmo2": FamilyFile("Olmo2", "olmo2"),
    "olmo3": FamilyFile("Olmo3", "olmo2", {**_LAYERS, "sliding_window": 8, "rope_parameters": YARN}),
    "exaone4": FamilyFile("Exaone4", "exaone4", {**_LAYERS, **WINDOW, "sliding_window_pattern": 4}),
    "cohere2": FamilyFile("Cohere2", "cohere2", {**_LAYERS, **WINDOW, "logit_scale": 0.5}),
    "granite": FamilyFile("Granite", "granite", _GRANITE),
    "granitemoe": FamilyFile("GraniteMoe", "granitemoe", {**_GRANITE, "num_local_experts": 4}),
    "granitemoe-shared": FamilyFile(
        "GraniteMoeShared",
        "granitemoe",
        {**_GRANITE, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "smollm3": FamilyFile("SmolLM3", "smollm3", _LAYERS),
    "starcoder2": FamilyFile("Starcoder2", "starcoder2", {"sliding_window": None}),
    "glm4": FamilyFile("Glm4", "glm4", {"head_dim": 16, "rope_parameters": HALF, "attention_bias": True}),
    "seed_oss": FamilyFile("SeedOss", "seed_oss", {"head_dim": 16}),
}

# Cases of llama.cpp's converter, in its layouts.
LAYOUTS = (
    *("arcee", "ministral3", "ernie4_5-moe", "dots1", "hunyuan-dense", "hunyuan-moe", "minimax-m2", "command-r"),
    "command-r-plus",
    *("chatglm", "nemotron", "phi2", "gptneox", "stablelm", "llama4", "granitehybrid", "mamba2", "nemotron_h_moe"),
)
# Other options of these, and what takes longest.
MORE_LAYOUTS = (
    *("ernie4_5", "exaone-moe", "gptneox-serial", "stablelm-parallel", "granitehybrid-dense", "bamba", "nemotron_h"),
)


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, FILES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logits_of_quantized_files_equal_transformers(tmp_path: Path, name: str) -> None:
    case = FILES[name]
    options = {**case.options, "hidden_size": 128} if name == "gemma" else case.options
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, replace(case, kind="Q8_0", options=options)))


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_logits_of_converted_layouts_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_layout(path, CASES[name]), (23, 16, 1))
