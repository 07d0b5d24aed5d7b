"""The model that drafts are trained for, as its workers compute it; nothing here changes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.stored_weights import open_weights
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.text.model_directory import read_model_directory
from kernels.layer_cache import allocate_layer_cache
from shared.errors import ConfigError

_BLOCK_SIZE = 16


def check_target(model: Path) -> None:
    """Refuse a model that drafts cannot be trained for.

    Raises:
        ConfigError: It is a GGUF file, or quantized, so that it may have no matrices to learn from; or it has no
            tokenizer.
        HeadraceError: Its configuration is missing or damaged.
    """
    if find_gguf(model) is not None:
        raise ConfigError("HEADRACE_TARGET", f"{model} is a GGUF file; name a Hugging Face directory")
    quantization = read_model_config(model).quantization
    if quantization is not None:
        problem = f"{model} is quantized ({quantization.name}); train for the model that it was made from"
        raise ConfigError("HEADRACE_TARGET", problem)
    try:
        read_model_directory(model)
    except ConfigError as error:
        raise ConfigError("HEADRACE_TARGET", error.problem) from None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The target's matrices over the vocabulary, float32, on the CPU.

    Attributes:
        embedding: `[vocab_size, hidden_size]`
        head: Likewise; the same tensor where the target ties them.
    """

    embedding: torch.Tensor
    head: torch.Tensor


def read_vocabulary(model: Path) -> Vocabulary:
    """Read the embedding and the head of a model that passed `check_target`.

    Raises:
        HeadraceError: They are missing or damaged.
    """
    config = read_model_config(model)
    size = (config.vocab_size, config.hidden_size)
    with open_weights(model, torch.float32, torch.device("cpu"), names=config.block.names) as weights:
        embedding = weights.take("model.embed_tokens.weight", *size)
        return Vocabulary(embedding, embedding if config.tie_word_embeddings else weights.take("lm_head.weight", *size))


class HiddenVectors:
    """Computes what the target makes of rows of tokens. Owns the target and a cache for one row."""

    def __init__(self, model: Path, dtype: torch.dtype, length: int) -> None:
        """Load the target.

        Args:
            model: Its directory.
            dtype: What it computes in.
            length: Tokens of a row.

        Raises:
            HeadraceError: It cannot be loaded.
        """
        device = torch.device("cpu")
        config = read_model_config(model)
        self._path = model
        self._model: CausalLM = load_model(model, dtype, device, max_model_len=length)
        self._positions = torch.arange(length)
        self._context = _one_row(config, dtype, length)

    @torch.inference_mode()
    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Return the hidden vectors of one row, normalised as for the head.

        Shapes:
            row: `[length]` int64
            result: `[length, hidden_size]`

        Raises:
            ConfigError: They are not numbers.
        """
        hidden = self._model.forward(row, self._positions, self._context)
        if not hidden.isfinite().all():
            problem = f"{self._path} computes vectors that are not numbers: its weights are broken"
            raise ConfigError("HEADRACE_TARGET", problem)
        return hidden


def _one_row(config: ModelConfig, dtype: torch.dtype, length: int) -> AttentionContext:
    device = torch.device("cpu")
    num_blocks = -(-length // _BLOCK_SIZE)
    sizes = (num_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return AttentionContext(
        caches=[allocate_layer_cache(*sizes, dtype, device) for _ in range(config.num_layers)],
        slot_mapping=torch.arange(length),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        max_query_len=length,
        max_context_len=length,
    )
