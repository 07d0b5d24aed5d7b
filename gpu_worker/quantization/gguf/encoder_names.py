"""The names that checkpoints of BERT and its descendants give the tensors of their GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping

ENCODER = "bert"
"""The architecture of such files."""

ENCODERS = frozenset({ENCODER, "modern-bert", "nomic-bert", "jina-bert-v3", "eurobert"})
"""The architectures of files whose models attend in both directions."""

_MODEL: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    # Of RoBERTa's head that scores; BERT's is not whole in such files.
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
_LAYER: Mapping[str, str] = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,3})\.)?([a-z_]+(?:\.output)?)\.(weight|bias)")


def encoder_name(name: str) -> str | None:
    """Return what a checkpoint calls the tensor, or None when no encoder that we serve has it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_MODEL[part]}.{kind}" if part in _MODEL else None
    return f"encoder.layer.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else None
