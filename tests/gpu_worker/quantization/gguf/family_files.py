"""Small random models of all families as GGUF files, transformed by formula as llama.cpp's converters transform them.

`transformers` is the oracle: it computes with the numbers that the file holds. `test_llama_cpp_files` shows that the
converter writes what is read; these need the `gguf` package only, whose own table names the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.gpu_worker.quantization.gguf.converted import Converted, is_less_one, random_model
from tests.gpu_worker.quantization.gguf.converted_dense import DENSE, HYBRIDS
from tests.gpu_worker.quantization.gguf.converted_mixtures import MIXTURES
from tests.gpu_worker.quantization.gguf.file_fields import add_fields
from tests.gpu_worker.quantization.gguf.raw_blocks import dequantized, random_rows
from tests.gpu_worker.quantization.gguf.written_file import VOCAB_SIZE, names_of, plain_vocabulary, written

Kind = gguf.GGMLQuantizationType
# Numbers, or the bytes of rows of blocks.
Array = npt.NDArray[Any]
Parts = Iterator[tuple[str, Array]]

# A checkpoint of every family that GGUF files are read of, for llama.cpp's own converter.
CASES: Mapping[str, Converted] = {**DENSE, **MIXTURES, **HYBRIDS}
# Sizes of which blocks of 32 make whole rows.
WHOLE_BLOCKS: Mapping[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}

_NEIGHBOURS = ("llama", "arcee", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3")
_PLAIN = ("gate.weight", "router.proj.weight", "moe.router.weight", "mlp.router.weight", "_bias")
_BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")
_MAMBA = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
# Names that the package's table does not know, because the converter has a rule for each.
_OWN_NAMES = {
    "self_attn.sinks": "attn_sinks.weight", "router.scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
    "expert_bias": "exp_probs_b.bias", "e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip


def write_family(path: Path, case: Converted, vocabulary: Callable[[Any], None] | None = None) -> Any:
    """Write a random model, and return the oracle with the numbers that the file holds."""
    oracle = random_model(case)
    config = oracle.config
    stored = names_of(case.architecture, config.num_hidden_layers)
    buffers = [(name, buffer) for name, buffer in oracle.named_buffers() if name.endswith(_BUFFERS)]
    with written(path, case.architecture) as writer:
        add_fields(writer, config, case)
        (vocabulary or partial(plain_vocabulary, size=config.vocab_size))(writer)
        for seed, (name, tensor) in enumerate([*oracle.named_parameters(), *buffers]):
            kind, array = _values(name, tensor, config, case, seed)
            for own, part in _transformed(name, array, config, case):
                part = np.ascontiguousarray(part)
                raw = part if part.dtype == np.uint8 else gguf.quants.quantize(part, kind)
                writer.add_tensor(stored(own), raw, raw_dtype=kind)
        for index in range(case.num_drafting):
            for part in ("attn_q.weight", "nextn.eh_proj.weight"):
                writer.add_tensor(f"blk.{config.num_hidden_layers + index}.{part}", np.ones((64, 64), np.float32))
    return oracle


def _values(name: str, tensor: torch.Tensor, config: Any, case: Converted, seed: int) -> tuple[Kind, Array]:
    """Return a tensor's type and its rows, which the oracle has too; experts' of two families lie transposed there."""
    is_transposed = ".experts." in name and tensor.dim() == 3 and case.architecture in ("llama4", "gpt-oss")
    rows = tensor.detach().mT if is_transposed else tensor.detach()
    # Vectors, routers and convolutions are never quantized.
    if tensor.dim() < 2 or name.endswith(_PLAIN) or "conv" in name.split(".")[-2]:
        return Kind.F32, rows.float().numpy()
    if case.blocks is not None:
        kind = case.blocks(name)
        spread = 0.3 if "embed_tokens" in name or "lm_head" in name else 1.5 / rows.shape[-1] ** 0.5
        blocks = random_rows(kind, rows[..., 0].numel(), rows.shape[-1], spread, seed)
        rows.copy_(torch.from_numpy(dequantized(kind, blocks)).view(rows.shape))
        return Kind[kind], blocks.reshape(*rows.shape[:-1], -1)
    if case.kind != "F32":
        _round(tensor, name, Kind[case.kind], case, config)
    return Kind[case.kind], rows.float().numpy()


def _round(tensor: torch.Tensor, name: str, kind: Kind, case: Converted, config: Any) -> None:
    """Give the oracle the numbers that the file will hold; rounding them again changes nothing."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(values.detach().numpy())
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))

    with torch.no_grad():
        if name.endswith("kv_b_proj.weight") and not case.whole_up:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            keys.copy_(rounded(keys.mT).mT)
            values.copy_(rounded(values))
        else:
            tensor.copy_(rounded(tensor))


def _transformed(name: str, array: Array, config: Any, case: Converted) -> Parts:
    """Return a tensor as its family's converter writes it, under names that the package's table knows."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    if case.architecture.startswith(("nemotron_h", "mamba2")):
        name = name.replace("model.", "backbone.", 1)
    if case.architecture == "falcon-h1":
        array = array * _factor(name, config)
    if (end := next((end for end in _OWN_NAMES if name.endswith(end)), None)) is not None:
        yield f"{layer}{_OWN_NAMES[end]}", array
    elif ".linear_attn." in name:
        yield from _of_state(name, layer, array, config, case)
    elif ".experts." in name or "moe.input_linear" in name or "moe.output_linear" in name:
        yield from _experts(name, layer, array, case)
    elif "shared_mlp." in name and "_linear" in name:
        yield from _granite_shared(name, layer, array, config)
    elif name.endswith("kv_b_proj.weight") and not case.whole_up:
        heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield f"{layer}attn_k_b.weight", keys.swapaxes(1, 2)
        yield f"{layer}attn_v_b.weight", values
    elif parts[-1] in _MAMBA or ".conv1d." in name or name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        yield from _mamba(name, layer, array, config)
    else:
        yield _plain(name, array, config, case)


def _plain(name: str, array: Array, config: Any, case: Converted) -> tuple[str, Array]:
    part = name.split(".")[-2]
    if is_less_one(case, name):
        array = array + 1
    if part in ("q_proj", "k_proj") and case.architecture in _NEIGHBOURS:
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if "query_key_value" in name:
        # All queries before all keys before all values, which lie by heads.
        heads = config.num_attention_heads
        array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    if ".conv.conv." in name:
        array = array[:, 0]
    return (name.replace(".router.weight", ".router.layer.weight") if "sparse" in name else name), array


def _experts(name: str, layer: str, array: Array, case: Converted) -> Parts:
    """Write gates and up projections apart, but for Gemma 4's; GPT-OSS's take turns."""
    end = "bias" if name.endswith("bias") else "weight"
    if "gate_up_proj" not in name and "input_linear" not in name:
        down = "down_proj" in name or "output_linear" in name
        yield f"{layer}ffn_{'down' if down else 'up'}_exps.{end}", array
    elif case.architecture == "gemma4":
        yield f"{layer}ffn_gate_up_exps.weight", array
    else:
        takes_turns = case.architecture == "gpt-oss"
        gate, up = (array[:, ::2], array[:, 1::2]) if takes_turns else np.split(array, 2, axis=1)
        yield f"{layer}ffn_gate_exps.{end}", gate
        yield f"{layer}ffn_up_exps.{end}", up


def _granite_shared(name: str, layer: str, array: Array, config: Any) -> Parts:
    end = "_shexp" if config.num_local_experts else ""
    if "output_linear" in name:
        yield f"{layer}ffn_down{end}.weight", array
        return
    gate, up = np.split(array, 2)
    yield f"{layer}ffn_gate{end}.weight", gate
    yield f"{layer}ffn_up{end}.weight", up


def _mamba(name: str, layer: str, array: Array, config: Any) -> Parts:
    """Return a tensor of a mixer: rates are negative, vectors of heads and of groups have rows."""
    part = name.split(".")[-1]
    if part == "A_log":
        array = -np.exp(array)
    if part in ("A_log", "D"):
        array = array[:, None]
    if part in _MAMBA:
        yield f"{layer}{_MAMBA[part]}", array
    elif ".conv1d." in name:
        yield f"{layer}ssm_conv1d.{part}", array.squeeze()
    else:
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        yield f"{layer}ssm_norm.weight", array.reshape(groups, -1)


def _of_state(name: str, layer: str, array: Array, config: Any, case: Converted) -> Parts:
    """Return a tensor of a gated delta net, its value heads in the file's order."""
    part = name.split(".linear_attn.")[1]
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    first = 2 * keys * key_dim

    def by_turns(rows: Array, width: int) -> Array:
        """From the value heads of one key head after another to the first of each key head, then the second."""
        if case.architecture == "qwen3next":
            return rows
        return rows.reshape(keys, ratio, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    def values_by_turns() -> Array:
        rows = array[:, 0] if array.ndim == 3 else array
        return np.concatenate([rows[:first], by_turns(rows[first:], value_dim)])

    if part == "in_proj_qkvz.weight" and not case.fuses_inputs:
        widths = np.cumsum([key_dim, key_dim, ratio * value_dim])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), widths, axis=1)
        *qkv, gates = (rows.reshape(-1, array.shape[1]) for rows in parts)
        yield f"{layer}attn_qkv.weight", np.concatenate(qkv)
        yield f"{layer}attn_gate.weight", gates
        return
    forms: Mapping[str, tuple[str, Callable[[], Array]]] = {
        "in_proj_qkvz.weight": ("ssm_in.weight", lambda: array),
        "in_proj_ba.weight": ("ssm_ba.weight", lambda: array),
        "in_proj_qkv.weight": ("attn_qkv.weight", values_by_turns),
        "in_proj_z.weight": ("attn_gate.weight", lambda: by_turns(array, value_dim)),
        "in_proj_b.weight": ("ssm_beta.weight", lambda: by_turns(array, 1)),
        "in_proj_a.weight": ("ssm_alpha.weight", lambda: by_turns(array, 1)),
        "conv1d.weight": ("ssm_conv1d.weight", values_by_turns),
        "A_log": ("ssm_a", lambda: by_turns(-np.exp(array), 1)),
        "dt_bias": ("ssm_dt.bias", lambda: by_turns(array, 1)),
        "norm.weight": ("ssm_norm.weight", lambda: array),
        "out_proj.weight": ("ssm_out.weight", lambda: by_turns(array.T.copy(), value_dim).T),
    }
    stored, form = forms[part]
    yield f"{layer}{stored}", form()


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
