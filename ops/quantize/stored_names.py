"""Which tensors of a checkpoint stay as they are, and what those that are rounded are called in its own names.

Families and tools name tensors differently; the engine's own names (`TensorNames.own_name`) are the same for all. What
is written has the checkpoint's names, so that whoever reads the model reads its quantized form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHT = ".weight"


class StoredNames:
    """The tensors of one checkpoint, by the engine's names for them."""

    def __init__(self, stored: Iterable[str], config: ModelConfig) -> None:
        """Name the tensors of a checkpoint that is opened without renaming."""
        self._config = config
        self._names = config.block.names
        self._stored: Mapping[str, str] = {self._names.own_name(name): name for name in stored}
        # From the beginnings of own names to those of stored ones, where what follows is the same.
        self._roots = dict(_roots(own, name) for own, name in self._stored.items())

    def module(self, own: str) -> str:
        """Return the checkpoint's name of a module, also of one that it does not have, such as an expert's."""
        if f"{own}{_WEIGHT}" in self._stored:
            return self._stored[f"{own}{_WEIGHT}"].removesuffix(_WEIGHT)
        parts = own.split(".")
        for count in range(len(parts), 0, -1):
            root = ".".join(parts[:count])
            if root in self._roots:
                return ".".join([self._roots[root], *parts[count:]])
        return own

    def of_layer(self, index: int, rounded: Iterable[str]) -> list[str]:
        """Return the tensors of a layer that stay, in the checkpoint's names; `rounded` are own names of modules."""
        prefix = f"model.layers.{index}."
        gone = {f"{module}{_WEIGHT}" for module in rounded}
        experts = tuple(f"{prefix}{name}" for name in _expert_names(self._config, index))
        return [
            stored
            for own, stored in self._stored.items()
            if own.startswith(prefix) and own not in gone and not own.startswith(experts)
        ]

    def outside_layers(self, *, has_head: bool) -> list[str]:
        """Return the tensors outside of the layers, but for a head that is rounded."""
        return [
            stored
            for own, stored in self._stored.items()
            if not self._is_in_layer(own) and not (has_head and own == f"lm_head{_WEIGHT}")
        ]

    def left_alone(self, checkpoint: Checkpoint) -> list[str]:
        """Return modules with matrices that belong to no layer of the decoder: readers must not look for scales."""
        unused = [stored for own, stored in self._stored.items() if self._names.is_unused(own)]
        matrices = [name for name in unused if name.endswith(_WEIGHT) and len(checkpoint.shape(name)) > 1]
        return [name.removesuffix(_WEIGHT) for name in matrices]

    def _is_in_layer(self, own: str) -> bool:
        match = _LAYER.match(own)
        return match is not None and int(match[1]) < self._config.num_layers


def _expert_names(config: ModelConfig, index: int) -> list[str]:
    """Return the beginning of the names of experts' matrices, within the layer."""
    shape = config.layer(index).mixture
    if shape is None:
        return []
    stacked = [name for pair in shape.names.stacked for name in pair]
    return [*(f"{name}." for name in shape.names.experts), *stacked]


def _roots(own: str, stored: str) -> tuple[str, str]:
    """Return the beginnings of both names behind which they are the same."""
    ours, theirs = own.split("."), stored.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)


def read_all(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors as they are stored."""
    return {name: checkpoint.take_raw(name) for name in names}
