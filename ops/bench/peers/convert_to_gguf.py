"""Writes a Llama, Mixtral or Qwen3.5 checkpoint in bfloat16 as GGUF, for llama.cpp; needs the package `gguf`.

Arguments: model directory, target file. The vocabulary is numbered words: the benchmarks give token ids, and the text
of an answer must tell how many tokens it has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Read as float32, like all of one dimension.
_WIDE = ("block_sparse_moe.gate.weight", "conv1d.weight")
_EXPERTS = "block_sparse_moe.experts"


def main(model_dir: Path, target: Path) -> None:
    """Convert."""
    import gguf

    config = json.loads((model_dir / "config.json").read_text())
    is_hybrid = "linear_num_key_heads" in config
    architecture = gguf.MODEL_ARCH.QWEN35 if is_hybrid else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer: Any = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if is_hybrid:
        _add_recurrent_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"], gguf.TokenType)
    for name, bits in _with_stacks(_tensors(model_dir / "model.safetensors"), config):
        theirs = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if bits.ndim == 1 or name.endswith(_WIDE):
            numbers = (bits.astype(np.uint32) << 16).view(np.float32).squeeze()
            writer.add_tensor(theirs, -np.exp(numbers) if name.endswith("A_log") else numbers)
            continue
        rows = bits if is_hybrid else _interleave(bits, name, config)
        writer.add_tensor(theirs, rows.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_recurrent_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    # Of a text's tokens all three coordinates are equal: any split of the pairs turns them alike.
    pairs = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
    writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["full_attention_interval"])


def _add_vocabulary(writer: Any, size: int, types: Any) -> None:
    """Add words of one token each; the first three are the unknown word, and the beginning and end of a text."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        ["<unk>", "<s>", "</s>", *(f"\N{LOWER ONE EIGHTH BLOCK}w{index}" for index in range(3, size))]
    )
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.NORMAL] * (size - 3)])
    for add, token_id in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(token_id)
    writer.add_add_bos_token(False)


def _tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Read the bits of each bfloat16 tensor, without torch."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, np.frombuffer(data[begin:end], dtype=np.uint16).reshape(entry["shape"])


def _with_stacks(
    tensors: Iterator[tuple[str, npt.NDArray[np.uint16]]], config: dict[str, Any]
) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Put the matrices of a layer's experts into one tensor, as soon as all have come."""
    stacks: dict[str, dict[int, npt.NDArray[np.uint16]]] = {}
    for name, bits in tensors:
        if _EXPERTS not in name:
            yield name, bits
            continue
        layer, _, rest = name.partition(f"{_EXPERTS}.")
        expert, matrix, _ = rest.split(".")
        stack = stacks.setdefault(f"{layer}{_EXPERTS}.{matrix}.weight", {})
        stack[int(expert)] = bits
        if len(stack) == config["num_local_experts"]:
            yield f"{layer}{_EXPERTS}.{matrix}.weight", np.stack([stack[index] for index in sorted(stack)])


def _interleave(bits: npt.NDArray[np.uint16], name: str, config: dict[str, Any]) -> npt.NDArray[np.uint16]:
    """Reorder the rows of query and key projections: llama.cpp rotates neighbours, Hugging Face halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return bits
    parts = bits.reshape(config[heads], 2, config["head_dim"] // 2, -1)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(bits.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
