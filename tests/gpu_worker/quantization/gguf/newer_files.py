"""Small random models of the newer families as GGUF files, their tensors named by the `gguf` package's own table.

What llama.cpp's converters change in tensors is done here by formula: weights of normalisations that checkpoints store
less one, the sign and form of decay rates, the order of heads, and experts' matrices apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.gpu_worker.quantization.gguf.converted import Converted, random_model
from tests.gpu_worker.quantization.gguf.family_files import SIZES
from tests.gpu_worker.quantization.gguf.gguf_models import plain_vocabulary
from tests.gpu_worker.quantization.gguf.written_file import names_of, written

Array = npt.NDArray[np.float32]
Parts = Iterator[tuple[str, Array]]


@dataclass(frozen=True)
class NewerFile(Converted):
    """A family whose file may be quantized.

    Attributes:
        kind: What matrices are stored as; vectors, routers and convolutions are F32.
        fuses_inputs: Queries, keys, values and gates of states are one matrix, as the first converters left them.
    """

    kind: str = "F32"
    fuses_inputs: bool = False


def write_newer(path: Path, case: NewerFile) -> Any:
    """Write a random model, and return the oracle with the numbers that the file holds."""
    oracle = random_model(replace(case, options={**SIZES, **case.options}))
    config = oracle.config
    stored = names_of(case.architecture, config.num_hidden_layers)
    buffers = [(n, b) for n, b in oracle.named_buffers() if n.endswith(("expert_bias", "layer_scalar"))]
    with written(path, case.architecture) as writer:
        _add_fields(writer, config, case)
        plain_vocabulary(writer)
        for name, tensor in [*oracle.named_parameters(), *buffers]:
            kind = _kind(name, tensor, case)
            if kind is not gguf.GGMLQuantizationType.F32:
                _round(tensor, kind)
            for own, array in _transformed(name, tensor.detach().float().numpy(), config, case):
                raw = gguf.quants.quantize(np.ascontiguousarray(array), kind)
                writer.add_tensor(stored(own), raw, raw_dtype=kind)
        if case.architecture == "gemma4":
            writer.add_tensor("rope_freqs.weight", _still_dimensions(case.options))
    return oracle


# Names that the package's table does not know, because the converter has a rule for each.
_OWN_NAMES = {
    "router.scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "expert_bias": "exp_probs_b.bias",
}


def _is_less_one(case: NewerFile, name: str) -> bool:
    return case.architecture.startswith("qwen") and "norm" in name and "linear_attn" not in name


def _kind(name: str, tensor: torch.Tensor, case: NewerFile) -> gguf.GGMLQuantizationType:
    plain = tensor.dim() < 2 or "conv" in name.split(".")[-2] or name.endswith(("gate.weight", "router.proj.weight"))
    return gguf.GGMLQuantizationType["F32" if plain else case.kind]


def _round(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    """Give the oracle the numbers that the file will hold: heads that move are of whole blocks."""
    with torch.no_grad():
        array = gguf.quants.quantize(np.ascontiguousarray(tensor.detach().numpy()), kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(array, kind)))


def _transformed(name: str, array: Array, config: Any, case: NewerFile) -> Parts:
    """Return a tensor as its family's converter writes it, under names that the package's table knows."""
    layer = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
    if case.architecture == "falcon-h1":
        array = array * _factor(name, config)
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif "conv" in name.split(".")[-2] and array.ndim == 3:
        array = array[:, 0]
    elif _is_less_one(case, name):
        array = array + 1
    if ".mamba." in name:
        yield from _of_mamba(name, layer, array, config)
    elif ".linear_attn." in name:
        yield from _of_state(name, layer, array, config, case)
    elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield from _experts(name, layer, array, case)
    else:
        end = next((end for end in _OWN_NAMES if name.endswith(end)), None)
        yield (name if end is None else f"{layer}{_OWN_NAMES[end]}"), array


def _experts(name: str, layer: str, array: Array, case: NewerFile) -> Parts:
    if "down_proj" in name or case.architecture == "gemma4":
        yield f"{layer}ffn_{'down' if 'down_proj' in name else 'gate_up'}_exps.weight", array
        return
    gate, up = np.split(array, 2, axis=1)
    yield f"{layer}ffn_gate_exps.weight", gate
    yield f"{layer}ffn_up_exps.weight", up


def _of_state(name: str, layer: str, array: Array, config: Any, case: NewerFile) -> Parts:
    """Return a tensor of a gated delta net, its value heads in the file's order."""
    part = name.split(".linear_attn.")[1]
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim

    def by_turns(rows: Array, width: int) -> Array:
        """From the value heads of one key head after another to the first of each key head, then the second."""
        if case.architecture == "qwen3next":
            return rows
        return rows.reshape(keys, ratio, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if part == "in_proj_qkvz.weight" and not case.fuses_inputs:
        widths = np.cumsum([key_dim, key_dim, ratio * value_dim])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), widths, axis=1)
        *qkv, gates = (rows.reshape(-1, array.shape[1]) for rows in parts)
        yield f"{layer}attn_qkv.weight", np.concatenate(qkv)
        yield f"{layer}attn_gate.weight", gates
        return
    first = 2 * keys * key_dim
    forms: Mapping[str, tuple[str, Callable[[], Array]]] = {
        "in_proj_qkvz.weight": ("ssm_in.weight", lambda: array),
        "in_proj_ba.weight": ("ssm_ba.weight", lambda: array),
        "in_proj_qkv.weight": (
            "attn_qkv.weight",
            lambda: np.concatenate([array[:first], by_turns(array[first:], value_dim)]),
        ),
        "in_proj_z.weight": ("attn_gate.weight", lambda: by_turns(array, value_dim)),
        "in_proj_b.weight": ("ssm_beta.weight", lambda: by_turns(array, 1)),
        "in_proj_a.weight": ("ssm_alpha.weight", lambda: by_turns(array, 1)),
        "conv1d.weight": (
            "ssm_conv1d.weight",
            lambda: np.concatenate([array[:first], by_turns(array[first:], value_dim)]),
        ),
        "A_log": ("ssm_a", lambda: by_turns(array, 1)),
        "dt_bias": ("ssm_dt.bias", lambda: by_turns(array, 1)),
        "norm.weight": ("ssm_norm.weight", lambda: array),
        "out_proj.weight": ("ssm_out.weight", lambda: by_turns(array.T.copy(), value_dim).T),
    }
    stored, form = forms[part]
    yield f"{layer}{stored}", form()


def _of_mamba(name: str, layer: str, array: Array, config: Any) -> Parts:
    """Return a tensor of a Mamba-2 mixer: vectors of heads and of the normalisation have rows."""
    part = name.split(".mamba.")[1]
    if part == "norm.weight":
        array = array.reshape(config.mamba_n_groups, -1)
    elif part in ("A_log", "D"):
        array = array[:, None]
    names = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
    modules = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
    module, _, end = part.partition(".")
    yield f"{layer}{names[part] if part in names else f'{modules[module]}.{end}'}", array


def _factor(name: str, config: Any) -> Any:
    """Return what Falcon-H1's converter multiplies a tensor by."""
    part = name.split(".")[-2]
    before = config.attention_in_multiplier
    if part == "in_proj":
        groups = config.mamba_n_groups * config.mamba_d_state
        widths = (config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads)
        return np.repeat(config.ssm_multipliers, widths)[:, None].astype(np.float32) * config.ssm_in_multiplier
    return {
        "q_proj": before,
        "k_proj": before * config.key_multiplier,
        "v_proj": before,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }.get(part, 1.0)


def _add_falcon_h1(writer: Any, config: Any, options: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(options["head_dim"])
    writer.add_value_length(options["head_dim"])
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_d_ssm)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_group_count(config.mamba_n_groups)


def _still_dimensions(options: Mapping[str, Any]) -> Array:
    share, size = options["rope_parameters"]["full_attention"]["partial_rotary_factor"], options["global_head_dim"]
    half, turning = size // 2, int(size * share / 2)
    return np.array([1.0] * turning + [1e30] * (half - turning), np.float32)


def _add_fields(writer: Any, config: Any, case: NewerFile) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    _OWN[case.architecture](writer, config, case.options)
    num_experts = getattr(config, "num_experts", None)
    if num_experts and getattr(config, "enable_moe_block", True):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(getattr(config, "top_k_experts", None) or config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_hybrid(writer: Any, config: Any, options: Mapping[str, Any]) -> None:
    rope = config.rope_parameters
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 0.25)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if "qwen3_5" in config.model_type:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_gemma4(writer: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Take what layers differ in from the options: the configuration has it by layer."""
    full_dim, dim = options["global_head_dim"], options["head_dim"]
    heads = options.get("num_key_value_heads", SIZES["num_key_value_heads"])
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared, inner = config.num_kv_shared_layers, config.intermediate_size
    first = config.num_hidden_layers - shared
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([inner if index < first else 2 * inner for index in range(len(slides))])
    else:
        writer.add_feed_forward_length(inner)
    full = options.get("num_global_key_value_heads", heads)
    writer.add_head_count_kv([heads if is_sliding else full for is_sliding in slides])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(dim)
    writer.add_value_length_swa(dim)
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_lfm2(writer: Any, config: Any, options: Mapping[str, Any]) -> None:
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([config.num_key_value_heads if is_attending else 0 for is_attending in attends])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if hasattr(config, "num_dense_layers"):
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_OWN: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], None]] = {
    "qwen3next": _add_hybrid,
    "qwen35": _add_hybrid,
    "qwen35moe": _add_hybrid,
    "gemma4": _add_gemma4,
    "falcon-h1": _add_falcon_h1,
    "lfm2": _add_lfm2,
    "lfm2moe": _add_lfm2,
}
