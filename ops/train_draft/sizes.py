"""How large a draft becomes: checked before hours are spent on what it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config
from ops.demo_model.architecture import Llama
from ops.train_draft.eagle import EagleNetwork
from ops.train_draft.folder import check_room
from ops.train_draft.medusa import MedusaStudent
from ops.train_draft.small_model import small_shape
from ops.train_draft.target import Vocabulary
from shared.errors import ConfigError

_BYTES_PER_WEIGHT = 16
"""In training: a weight, its gradient and, of most, two running means of it, in float32."""

_REMEDIES = {
    "model": ("HEADRACE_HIDDEN_SIZE", "set a smaller one, or fewer HEADRACE_NUM_LAYERS"),
    "medusa": ("HEADRACE_MEDUSA_NUM_HEADS", "set fewer, or HEADRACE_MEDUSA_SHARED_HEAD"),
    "eagle": ("HEADRACE_KIND", "train another kind, or free some memory"),
}


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a draft; those of other kinds do not matter.

    Attributes:
        hidden_size: Of a small model; None is about a quarter of the target's.
        num_layers: Likewise; None is about an eighth.
        num_heads: Of Medusa: tokens to predict.
        head_layers: Of Medusa: residual blocks of a head.
        shares_head: Of Medusa: heads use the target's vocabulary matrix and have none of their own.
        num_steps: Of EAGLE: draft tokens to unroll in training.
    """

    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int = 3
    head_layers: int = 1
    shares_head: bool = False
    num_steps: int = 2


def num_weights(module: torch.nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


def check_sizes(kind: str, model: Path, shape: DraftShape, folder: Path) -> None:
    """Refuse a draft that the memory cannot train or the disk cannot hold.

    Raises:
        ConfigError: Says how much is free and how much is needed.
        HeadraceError: The target's configuration is missing or damaged.
    """
    count = num_weights(_outline(kind, read_model_config(model), shape))
    needed, free = count * _BYTES_PER_WEIGHT, free_host_bytes()
    if needed > free:
        variable, remedy = _REMEDIES[kind]
        problem = f"training {count:,} weights needs {shown_bytes(needed)}, but {shown_bytes(free)} of memory are free"
        raise ConfigError(variable, f"{problem}; {remedy}")
    check_room(count, folder)


def _outline(kind: str, target: ModelConfig, shape: DraftShape) -> torch.nn.Module:
    """Return the student that would be trained, with tensors that take no memory."""
    with torch.device("meta"):
        if kind == "model":
            return Llama(small_shape(target, shape.hidden_size, shape.num_layers))
        if kind == "eagle":
            return EagleNetwork(target)
        matrix = torch.empty(target.vocab_size, target.hidden_size)
        vocabulary, heads, layers = Vocabulary(matrix, matrix), shape.num_heads, shape.head_layers
        return MedusaStudent(target, vocabulary, heads, layers, shares_head=shape.shares_head).module
