"""GGUF files of small random encoders, and their vocabularies, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.gpu_worker.quantization.gguf.written_file import written

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_encoder(path: Path, model: Any, tokens: Sequence[str], separator: int, pooling: int | None = None) -> None:
    """Write BERT's layout of a model of `transformers`."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, model.config.num_hidden_layers)
    with written(path, "bert") as writer:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        if pooling is not None:
            writer.add_pooling_type(gguf.PoolingType(pooling))
        add_pieces(writer, tokens)
        writer.add_sep_token_id(separator)
        for name, tensor in model.named_parameters():
            if not name.startswith("pooler."):
                stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
                writer.add_tensor(stored, np.ascontiguousarray(tensor.detach().numpy()))


def add_pieces(writer: Any, tokens: Sequence[str]) -> None:
    """Add BERT's vocabulary: beginnings of words are marked, and what goes on is not."""
    special = [token.startswith("[") and token.endswith("]") for token in tokens]
    pieces = [
        token if is_special else token[2:] if token.startswith("##") else f"▁{token}"
        for token, is_special in zip(tokens, special, strict=True)
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if is_special else 1 for is_special in special])
    for add, token in ((writer.add_unk_token_id, "[UNK]"), (writer.add_bos_token_id, "[CLS]")):
        if token in tokens:
            add(list(tokens).index(token))


def trained_word_pieces(corpus: Sequence[str]) -> Tokenizer:
    """Train a tokenizer as BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    return tokenizer


def trained_unigrams(corpus: Sequence[str]) -> Tokenizer:
    """Train a tokenizer as XLM-RoBERTa's, without its table of characters."""
    tokenizer = Tokenizer(models.Unigram())
    spaces = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    return tokenizer
