"""Reading `config.json`: both generations of its form, and errors that name the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape
from gpu_worker.layers.mamba2 import OutputNorm
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import ModelConfig, eviction_problem
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.layer_types import all_but_every, read_layer_types, read_optional_windows, read_windows
from gpu_worker.models.recurrent_config import read_mamba2
from gpu_worker.models.registry import _INSTEAD, FAMILIES, read_model_config
from tests.gpu_worker.models.support_page import sample_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}


def read(directory: Path, fields: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return read_model_config(directory)


def test_absent_optional_fields_take_the_family_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeParameters(RopeType.DEFAULT, 10000.0, 2048)
    assert config.layer_windows == (None,) * 4
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == frozenset()
    assert config.dtype is torch.float32


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read(tmp_path, {**LLAMA, "eos_token_id": 4}).eos_token_ids == {4, 5, 6}
    assert read(tmp_path, {**LLAMA, "eos_token_id": None}).eos_token_ids == {5, 6}


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_names(tmp_path: Path, field: str) -> None:
    assert read(tmp_path, {**LLAMA, field: "bfloat16"}).dtype is torch.bfloat16


def test_files_say_the_dtype_that_no_field_does(tmp_path: Path) -> None:
    """As of gpt-oss: small vectors may be wider, and quantized tensors do not count."""
    assert read(tmp_path, LLAMA).dtype is torch.float32
    tensors = {"a": torch.ones(8, 8).bfloat16(), "b": torch.ones(3), "c": torch.ones(99, 99, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    assert read(tmp_path, LLAMA).dtype is torch.bfloat16
    assert read(tmp_path, {**LLAMA, "dtype": "float16"}).dtype is torch.float16
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"torn")
    assert read(tmp_path, LLAMA).dtype is torch.float32


def test_attention_by_chunks_is_served_as_far_as_it_is_plain(tmp_path: Path) -> None:
    chunks = {"chunk_size": 1024, "local_size": 64, "original_max_position_embeddings": 1024}
    assert read(tmp_path, {**QWEN2, "dual_chunk_attention_config": chunks}).max_model_len == 1024


def test_old_and_new_rope_forms_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = read(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = read(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    oldest = read(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert old == new == oldest
    assert new.rope == RopeParameters(RopeType.LLAMA3, 5e5, 256, 8.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
    ],
)
def test_context_length_includes_the_scaling(tmp_path: Path, scaling: dict[str, Any], max_model_len: int) -> None:
    assert read(tmp_path, {**LLAMA, "rope_scaling": scaling}).max_model_len == max_model_len


def test_qwen_window_counts_only_where_enabled(tmp_path: Path) -> None:
    window = {"sliding_window": 32, "max_window_layers": 3}
    assert read(tmp_path, {**QWEN2, **window}).layer_windows == (None,) * 4
    enabled = {**QWEN2, **window, "use_sliding_window": True}
    assert read(tmp_path, enabled).layer_windows == (None, None, None, 32)
    assert read(tmp_path, {**enabled, "sliding_window": None}).layer_windows == (None,) * 4
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, {**enabled, "layer_types": types}).layer_windows == (32, None, None, 32)


def test_mistral_window_is_absent_only_when_null(tmp_path: Path) -> None:
    assert read(tmp_path, {**MISTRAL, "sliding_window": None}).layer_windows == (None,) * 4
    assert read(tmp_path, MISTRAL).layer_windows == (4096,) * 4


@pytest.mark.parametrize("architectures", [["BloomForCausalLM"], [], None, ["x" * 100_000]])
def test_unknown_architecture_is_told_where_the_supported_ones_stand(tmp_path: Path, architectures: object) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, {**LLAMA, "architectures": architectures})
    message = str(raised.value)
    assert "unsupported architecture" in message
    assert "ops/docs/models.md" in message
    assert len(message) < 800


@pytest.mark.parametrize(
    ("asked", "nearest"), [("Qwen33ForCausalLM", ".*Qwen3ForCausalLM"), ("LlamaForCausaLM", "LlamaForCausalLM")]
)
def test_unknown_architecture_is_told_the_nearest_names(tmp_path: Path, asked: str, nearest: str) -> None:
    with pytest.raises(CheckpointError, match=rf"nearest by name: {nearest}"):
        read(tmp_path, {**LLAMA, "architectures": [asked]})


def test_models_that_many_ask_for_are_refused_with_what_stands_for_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'MllamaForConditionalGeneration', which is not .*; Llama 3\.1, .* is$"):
        read(tmp_path, {**LLAMA, "architectures": ["MllamaForConditionalGeneration"]})
    assert FAMILIES.keys().isdisjoint(_INSTEAD)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", None),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("vocab_size", "100"),
        ("vocab_size", 2**40),
        ("hidden_size", 64.0),
        ("hidden_size", 65),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 15),
        ("head_dim", 2),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("max_position_embeddings", 2**31),
        ("rope_theta", 1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("tie_word_embeddings", 1),
        ("attention_bias", "yes"),
        ("eos_token_id", -1),
        ("eos_token_id", [1, None]),
        ("hidden_act", "mish"),
        ("dtype", "float8_e4m3fn"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("architectures", "LlamaForCausalLM"),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.01),
        ("partial_rotary_factor", 1e308),
        ("rope_scaling", []),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0, "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": "1"}),
        (
            "rope_scaling",
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 1,
            },
        ),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-308}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1e308}),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.13}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 1e300}),
        ("rope_scaling", {"full_attention": {"rope_type": "default"}}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.5, "high_freq_factor": 4.0}),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: field '{field}"):
        read(tmp_path, {**LLAMA, field: value})


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention"] * 3 + ["chunked_attention"], [1, 2, 3, 4]])
def test_wrong_layer_types_are_named(tmp_path: Path, types: list[object]) -> None:
    with pytest.raises(CheckpointError, match="field 'layer_types'"):
        read(tmp_path, {**QWEN2, "use_sliding_window": True, "layer_types": types})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_config_that_is_not_an_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: is not"):
        read_model_config(tmp_path)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)


def test_old_names_of_gpt_neox_stand_behind_the_new_ones(tmp_path: Path) -> None:
    old = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "rotary_emb_base": 2e4}
    config = read(tmp_path, {**old, "num_key_value_heads": 1})
    assert (config.num_kv_heads, config.attention_shape(0).rotary_dim) == (4, 8)
    assert config.rope == RopeParameters(RopeType.DEFAULT, 2e4, 2048)
    new = {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 1.0}
    config = read(tmp_path, {**old, "rope_parameters": new})
    assert config.attention_shape(0).rotary_dim is None
    assert config.rope == RopeParameters(RopeType.DEFAULT, 3e4, 2048)


def test_quarter_of_a_head_turns_where_a_hybrid_says_nothing(tmp_path: Path) -> None:
    hybrid = {**LLAMA, "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 32}
    assert read(tmp_path, hybrid).attention_shape(3).rotary_dim == 8
    assert read(tmp_path, {**hybrid, "partial_rotary_factor": 0.5}).attention_shape(3).rotary_dim == 16


def test_first_release_of_lfm2_says_the_size_of_its_blocks_in_a_field_of_its_own(tmp_path: Path) -> None:
    first = {**LLAMA, "architectures": ["Lfm2ForCausalLM"], "block_ff_dim": 12288, "intermediate_size": None}
    first["num_key_value_heads"] = 4
    assert read(tmp_path, first).intermediate_size == 8192
    assert read(tmp_path, {**first, "intermediate_size": 48}).intermediate_size == 8192


def test_granite_without_recurrent_layers_needs_no_sizes_of_them(tmp_path: Path) -> None:
    """Granite 4 Micro attends in all layers."""
    micro = {**LLAMA, "architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}
    types = ["attention"] * micro["num_hidden_layers"]
    assert not read(tmp_path, {**micro, "layer_types": types}).has_states
    with pytest.raises(CheckpointError, match="field 'mamba_d_state' is missing"):
        read(tmp_path, {**micro, "layer_types": ["mamba", *types[1:]], "mamba_n_heads": 2, "mamba_d_head": "auto"})


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("LlamaForCausalLM", None),
        ("GptOssForCausalLM", "sliding windows"),
        ("Qwen3NextForCausalLM", "recurrent"),
        ("DeepseekV3ForCausalLM", "latent"),
        ("GPT2LMHeadModel", "learned"),
        ("BertModel", "both directions"),
    ],
)
def test_models_that_can_forget_tokens_are_those_of_one_rotated_cache(architecture: str, problem: str | None) -> None:
    found = eviction_problem(sample_config(architecture), 4096)
    assert found is None if problem is None else problem in (found or "")


def test_whole_model_that_is_called_as_layers_alone_keeps_its_head(tmp_path: Path) -> None:
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99}
    for is_tied in (False, True):
        config = read(tmp_path, {"architectures": ["GPT2LMHeadModel"], **fields, "tie_word_embeddings": is_tied})
        assert config.tie_word_embeddings is is_tied


def test_rotations_that_depend_on_the_length_forget_no_tokens(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "dynamic" in (eviction_problem(read(tmp_path, {**LLAMA, "rope_parameters": dynamic}), 4096) or "")


def make_file(**fields: Any) -> JsonFile:
    return JsonFile(Path("config.json"), {"num_hidden_layers": 4, **fields})


def test_absent_types_follow_the_pattern() -> None:
    kinds = read_layer_types(make_file(), ("conv", "attention"), lambda layer: "conv" if layer else "attention")
    assert kinds == ("attention", "conv", "conv", "conv")


@pytest.mark.parametrize("types", [["dense"] * 3, ["dense"] * 5, ["dense", "dense", "dense", "other"]])
def test_wrong_types_are_refused_by_the_name_of_their_field(types: list[str]) -> None:
    file = make_file(mlp_layer_types=types)
    with pytest.raises(CheckpointError, match=r"'mlp_layer_types' must name dense or sparse for each of .* \(4\)"):
        read_layer_types(file, ("dense", "sparse"), lambda _layer: "dense", "mlp_layer_types")


def test_windows_are_where_types_say_and_else_where_the_pattern_does() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert read_windows(make_file(layer_types=types), all_but_every(2), 8) == (8, None, None, None)
    assert read_windows(make_file(sliding_window=5), all_but_every(2), 8) == (5, None, 5, None)
    assert read_windows(make_file(sliding_window=None), all_but_every(2), 8) == (None,) * 4


def test_optional_windows_count_only_when_they_are_switched_on() -> None:
    fields = {"sliding_window": 16, "max_window_layers": 3}
    assert read_optional_windows(make_file(**fields)) is None
    assert read_optional_windows(make_file(use_sliding_window=True, **fields)) == (None, None, None, 16)


FALCON, MAMBA2, NEMOTRON = "FalconH1ForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"
SIZES = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_state": 64}


def file_of(**fields: Any) -> JsonFile:
    return JsonFile(Path("config.json"), {**SIZES, **fields})


def test_heads_divide_the_inner_size() -> None:
    assert read_mamba2(file_of(mamba_d_head="auto")).sizes.head_dim == 64
    assert read_mamba2(file_of(mamba_expand=4)).sizes.head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_d_head": 32}, "'mamba_d_head' times mamba_n_heads is 32 . 8; it must be the inner size, 512"),
        ({"mamba_n_groups": 3}, "'mamba_n_groups' is 3; it must divide mamba_n_heads .8."),
        ({"mamba_d_state": 257}, "'mamba_d_state' is 257; it must be a whole number from 1 to 256"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; the convolutions of Mamba-2 are served with 'silu'"),
        ({"time_step_limit": [0.5, 0.1]}, r"'time_step_limit' is \[0.5, 0.1\]; it must be two numbers"),
        ({"time_step_limit": [0.5]}, "must be two numbers"),
        ({"time_step_limit": ["a", 1]}, "must be two numbers"),
    ],
)
def test_mixer_that_cannot_be_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_mamba2(file_of(**fields))


@pytest.mark.parametrize("end", [math.inf, {"__float__": "Infinity"}], ids=str)
def test_bound_of_steps_may_be_infinite(end: object) -> None:
    assert read_mamba2(file_of(time_step_limit=[0.001, end])).step_limits == (0.001, math.inf)
    assert read_mamba2(file_of()).step_limits == (0.0, math.inf)


def test_factors_of_falcon_go_where_they_cost_nothing() -> None:
    fields = {"attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5, "key_multiplier": 0.5}
    fields |= {"ssm_in_multiplier": 3.0, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0]}
    mixer = sample_config(FALCON, **fields).layer(0).mixer
    assert isinstance(mixer, AttentionBesideMamba2Shape)
    assert (mixer.attention.scale, mixer.attention.output_scale) == (2 * 32**-0.5, 1.0)
    assert mixer.mamba2.input_scales == (3.0, 6.0, 9.0, 12.0, 15.0)
    assert mixer.mamba2.norm is OutputNorm.NONE


def test_layers_of_nemotron_are_letters_or_names() -> None:
    by_letter = sample_config(NEMOTRON, hybrid_override_pattern="M*-")
    by_name = sample_config(NEMOTRON, layers_block_type=["mamba", "attention", "mlp"])
    assert by_letter == by_name
    assert [(layer.mixer is None, layer.feed_forward is None) for layer in by_letter.layers] == [
        (False, True),
        (False, True),
        (True, False),
    ]


def test_granite_rotates_where_it_says_so() -> None:
    for kind, rotary in (("rope", 0), ("nope", None), (None, None)):
        shape = sample_config("GraniteMoeHybridForCausalLM", position_embedding_type=kind).layer(7).mixer
        assert isinstance(shape, AttentionShape)
        assert shape.rotary == rotary


def test_mamba2_has_no_attention_and_a_bound_of_its_own() -> None:
    attention = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
    config = sample_config(MAMBA2, max_position_embeddings=None, **attention)
    assert config.has_states
    assert config.max_model_len == 8192
    assert (config.ropes, config.num_heads, config.num_kv_heads, config.head_dim) == ((), 0, 0, 0)
    assert config.intermediate_size == 0


def test_block_of_nemotron_has_a_size_where_there_is_one() -> None:
    assert sample_config(NEMOTRON, hybrid_override_pattern="M*", intermediate_size=None).intermediate_size == 0
