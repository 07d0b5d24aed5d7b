"""BERT, RoBERTa and XLM-RoBERTa: attention in both directions, learned positions and segments. They generate nothing.

Many multilingual embedding models and rerankers are XLM-RoBERTa.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import EncoderTraits, ModelConfig, read_activation, read_dtype
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile


def read_encoder(file: JsonFile, *, skips_padding: bool) -> ModelConfig:
    """Read BERT or a descendant; with `skips_padding`, positions begin behind the padding token's, as RoBERTa's do."""
    activation = read_activation(file, default="gelu")
    file.require("position_embedding_type", "absolute")
    if file.nested("quantization_config") is not None:
        raise file.error("quantization_config", "is set; encoders are served with dense weights only")
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    num_heads, size = file.integer("num_attention_heads", maximum=1024), file.integer("hidden_size")
    if size % num_heads:
        raise file.error("hidden_size", f"is {size}; it must be a multiple of num_attention_heads ({num_heads})")
    num_positions = file.integer("max_position_embeddings")
    first = file.integer("pad_token_id", 1, minimum=0) + 1 if skips_padding else 0
    num_segments = file.integer("type_vocab_size", 2)
    separator = _separator(file.path.parent) if num_segments > 1 else None
    return ModelConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=size,
        intermediate_size=file.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=size // num_heads,
        rms_norm_eps=file.number("layer_norm_eps", 1e-12),
        # Positions are learned: nothing is rotated.
        rope=RopeParameters(RopeType.DEFAULT, 10_000.0, num_positions),
        max_model_len=num_positions - first,
        layers=(),
        tie_word_embeddings=True,
        eos_token_ids=frozenset(),
        bos_token_id=None,
        dtype=read_dtype(file),
        encoder=EncoderTraits(activation, num_positions, first, num_segments, separator),
    )


def _separator(directory: Path) -> int | None:
    """Return the token behind which the second segment begins; None where the tokenizer's files name none."""
    settings, tokenizer = (directory / name for name in ("tokenizer_config.json", "tokenizer.json"))
    name = JsonFile.read(settings).fields.get("sep_token", "[SEP]") if settings.exists() else "[SEP]"
    content = name.get("content") if isinstance(name, dict) else name
    added = JsonFile.read(tokenizer).fields.get("added_tokens", []) if tokenizer.exists() else []
    ids = [token["id"] for token in added if isinstance(token, dict) and token.get("content") == content]
    return ids[0] if ids and isinstance(ids[0], int) else None


_read_roberta = partial(read_encoder, skips_padding=True)
FAMILIES = (
    Family("BertModel", partial(read_encoder, skips_padding=False)),
    Family("RobertaModel", _read_roberta),
    Family("XLMRobertaModel", _read_roberta),
)
