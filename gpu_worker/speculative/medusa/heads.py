"""Medusa heads: each scores one token more, from the same hidden vector of the model that they were trained for.

Read from the layout of the paper's authors (`0.0.linear.weight` …, in `medusa_lm_head.safetensors`) and from the one
that vLLM converts it to (`blocks.0.layers.0.weight` …, `lm_heads.0.weight`, in `model.safetensors`). A head without a
vocabulary matrix of its own uses the model's.

Source: Cai et al., "Medusa" (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.json_file import JsonFile
from gpu_worker.speculative.draft_files import open_draft_weights
from kernels.linear import Linear

WEIGHTS_FILE = "medusa_lm_head.safetensors"
"""What the paper's authors call it."""

_MAX_HEADS = 16
_MAX_BLOCKS = 16
_REMEDY = "take heads that were trained for this model"


class MedusaHeads:
    """The heads of one model. Holds weights only.

    Attributes:
        device: Where they run.
        num_heads: Head `i` scores the token that lies `i + 2` behind the one whose hidden vector it is given.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Linear]],
        vocabularies: Sequence[LMHead | None],
        model: CausalLM,
        dtype: torch.dtype,
    ) -> None:
        """Hold the heads.

        Args:
            blocks: The residual blocks, in order, at least one; the first yields the features of all heads, end to end,
                from their common input, and of each further one there is one a head.
            vocabularies: The heads' own matrices; None uses the model's.
            model: What the heads were trained for.
            dtype: What they compute in.
        """
        self.num_heads = len(vocabularies)
        self.device = model.device
        self._blocks = blocks
        self._vocabularies = vocabularies
        self._model_head = model.head_in(dtype)
        self._dtype = dtype

    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Score the vocabulary by the first `num_heads` heads.

        Shapes:
            hidden: `[num_rows, hidden_size]`, normalised as for the model's own head
            result: `[num_heads, num_rows, vocab_size]` float32
        """
        features = self._features(hidden.to(self._dtype), num_heads)
        own = self._vocabularies[:num_heads]
        if not any(own):
            return self._model_head(features.flatten(0, 1)).view(num_heads, len(hidden), -1)
        score = [self._model_head if head is None else head for head in own]
        return torch.stack([head(rows) for head, rows in zip(score, features, strict=True)])

    def _features(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return what the residual blocks make of the vectors, `[num_heads, num_rows, hidden_size]`."""
        first = self._blocks[0][0](hidden).view(len(hidden), self.num_heads, -1).transpose(0, 1)
        features = F.silu(first[:num_heads]) + hidden
        for block in self._blocks[1:]:
            products = [linear(rows) for rows, linear in zip(features, block[:num_heads], strict=True)]
            features = features + F.silu(torch.stack(products))
        return features


def load_medusa_heads(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Load the heads that were trained for `model`.

    Args:
        directory: Holds `config.json` and the weights.
        model: Gives device, sizes, and the vocabulary matrix where heads have none.
        dtype: What to compute in; None is the model's.

    Raises:
        CheckpointError: A file, field or tensor is missing, malformed, or of another model's size.
    """
    config = JsonFile.read(directory / "config.json")
    prefix = "medusa_" if "medusa_num_heads" in config.names() else ""
    num_heads = config.integer(f"{prefix}num_heads", maximum=_MAX_HEADS)
    num_blocks = config.integer(f"{prefix}num_layers" if prefix else "num_hidden_layers", 1, maximum=_MAX_BLOCKS)
    dtype = dtype or model.dtype
    with open_draft_weights(directory, dtype, model.device, WEIGHTS_FILE) as checkpoint:
        names = _Names(checkpoint, num_blocks)
        _check_size(checkpoint, names.block(0, 0), model)
        first = _take_block(checkpoint, [names.block(head, 0) for head in range(num_heads)], model)
        further = [
            [_take_block(checkpoint, [names.block(head, block)], model) for head in range(num_heads)]
            for block in range(1, num_blocks)
        ]
        vocabularies = [_take_vocabulary(checkpoint, names.vocabulary(head), model) for head in range(num_heads)]
        checkpoint.check_all_taken()
    return MedusaHeads([[first], *further], vocabularies, model, dtype)


class _Names:
    """What tensors are called in the layout at hand."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int) -> None:
        self._is_converted = checkpoint.has("blocks.0.layers.0.weight")
        self._num_blocks = num_blocks

    def block(self, head: int, block: int) -> str:
        return f"blocks.{head}.layers.{block}" if self._is_converted else f"{head}.{block}.linear"

    def vocabulary(self, head: int) -> str:
        return f"lm_heads.{head}.weight" if self._is_converted else f"{head}.{self._num_blocks}.weight"


def _take_block(checkpoint: Checkpoint, names: Sequence[str], model: CausalLM) -> Linear:
    """Take linear layers of the same input as one."""
    size = model.config.hidden_size
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(size, size)] * len(names))
    if not checkpoint.has(f"{names[0]}.bias"):
        return model.linears.make(weight)
    return model.linears.make(weight, checkpoint.take_rows([f"{name}.bias" for name in names], [(size,)] * len(names)))


def _take_vocabulary(checkpoint: Checkpoint, name: str, model: CausalLM) -> LMHead | None:
    """Take a head's own matrix, if it has one."""
    if not checkpoint.has(name):
        return None
    size, shape = model.config.vocab_size, checkpoint.shape(name)
    if shape[0] != size:
        raise checkpoint.error(name, f"has shape {list(shape)}, but the model has {size} tokens; {_REMEDY}")
    weight = checkpoint.take(name, size, model.config.hidden_size)
    return LMHead(model.linears.make(weight), weight.dtype)


def _check_size(checkpoint: Checkpoint, block: str, model: CausalLM) -> None:
    name, size = f"{block}.weight", model.config.hidden_size
    if checkpoint.has(name) and checkpoint.shape(name) != (size, size):
        shape = list(checkpoint.shape(name))
        raise checkpoint.error(
            name, f"has shape {shape}, but the model's hidden vectors have {size} numbers; {_REMEDY}"
        )
