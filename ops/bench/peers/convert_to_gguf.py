"""Writes a Llama or Mixtral checkpoint in bfloat16 as GGUF, for llama.cpp. Runs in the environment that has `gguf`.

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

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = "block_sparse_moe.experts"
_EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def main(model_dir: Path, target: Path) -> None:
    """Convert."""
    import gguf

    config = json.loads((model_dir / "config.json").read_text())
    writer: Any = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    _add_vocabulary(writer, config["vocab_size"], gguf.TokenType)
    for name, bits in _with_stacks(_tensors(model_dir / "model.safetensors"), config):
        # Norms and routers are read as float32.
        if bits.ndim == 1 or name.endswith("block_sparse_moe.gate.weight"):
            writer.add_tensor(_gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        rows = _interleave(bits, name, config)
        writer.add_tensor(_gguf_name(name), rows.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    _, _, index, part = stem.split(".", 3)
    if part.startswith(_EXPERTS):
        return f"blk.{index}.{_EXPERT_NAMES[part.rpartition('.')[2]]}.weight"
    return f"blk.{index}.{_NAMES[part]}.weight"


def _interleave(bits: npt.NDArray[np.uint16], name: str, config: dict[str, Any]) -> npt.NDArray[np.uint16]:
    """Reorder the rows of query and key projections: llama.cpp rotates neighbours, Hugging Face halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return bits
    parts = bits.reshape(config[heads], 2, config["head_dim"] // 2, -1)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(bits.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
