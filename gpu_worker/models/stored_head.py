"""Whether a model's head is its embedding: its files say it, where `tie_word_embeddings` does not or is wrong.

Models that also see or hear have the flag in several places, or nowhere. As in `transformers`, a stored head that
differs from the embedding is the head, whatever the flag says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.shard_files import INDEX_FILE, SINGLE_FILE
from gpu_worker.models.tensor_file import TensorFile

_HEAD, _EMBEDDING = "lm_head.", "model.embed_tokens.weight"


def with_stored_head(config: ModelConfig, directory: Path, *, has_flag: bool = True) -> ModelConfig:
    """Return the configuration with `tie_word_embeddings` as the files have it.

    Args:
        config: As `config.json` says.
        directory: Of the files.
        has_flag: A model without the flag's `true` has its own head, and one without a stored head is an error.
    """
    if has_flag and not config.tie_word_embeddings:
        return config
    head = has_head(directory, config.block.names)
    if head is None:
        return config
    return dataclasses.replace(config, tie_word_embeddings=not (head and _differs(directory, config.block.names)))


def _differs(directory: Path, names: TensorNames) -> bool:
    """Whether the stored head is another matrix than the embedding."""
    try:
        with Checkpoint(
            directory, torch.float32, torch.device("cpu"), adds_root=True, renamed=names.renamed, unused=names.unused
        ) as checkpoint:
            return not checkpoint.are_same(f"{_HEAD}weight", _EMBEDDING)
    except (CheckpointError, OSError):
        return True


def has_head(directory: Path, names: TensorNames) -> bool | None:
    """Return whether there is a tensor of the head; None where no file can be read, or none holds weights.

    Whoever reads the weights says what is wrong with a file.

    Args:
        directory: Of the files.
        names: Of the family's tensors.
    """
    stored = [names.own_name(name) for name in _stored_names(directory)]
    return any(name.startswith(_HEAD) for name in stored) if stored else None


def _stored_names(directory: Path) -> Iterable[str]:
    try:
        if (directory / SINGLE_FILE).exists():
            file = TensorFile(directory / SINGLE_FILE)
            file.close()
            return file.tensors
        if (directory / INDEX_FILE).exists():
            weight_map = JsonFile.read(directory / INDEX_FILE).nested("weight_map")
            return () if weight_map is None else weight_map.names()
    except CheckpointError:
        pass
    return ()
