"""The files of a proposer's weights: what they are, how they are opened, and what drafts are computed in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.execution.runner_config import RunnerConfig, choose_draft_dtype, choose_dtype
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.tensor_file import INDEX_FILE, SINGLE_FILE
from gpu_worker.quantization.gguf.model_file import find_gguf

_PICKLES = ("*.pt", "*.bin", "*.pth")


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A directory with weights and its `config.json`, or a GGUF file without."""

    directory: Path
    config: JsonFile | None

    @classmethod
    def read(cls, directory: Path) -> DraftFiles:
        """Read the configuration; `HeadraceError` if a file is missing or damaged."""
        is_gguf = find_gguf(directory) is not None
        return cls(directory, None if is_gguf else JsonFile.read(directory / "config.json"))

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of this name; `CheckpointError` as of `open_draft_weights`."""
        with open_draft_weights(self.directory, torch.float32, torch.device("cpu")) as weights:
            return weights.has(name)


def open_draft_weights(directory: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Open safetensors weights, a context manager; `CheckpointError` if a file is missing, damaged or pickled."""
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        for pickle in sorted(path for pattern in _PICKLES for path in directory.glob(pattern)):
            problem = f"is pickled, which runs code when it is read; convert its tensors to {SINGLE_FILE}"
            raise CheckpointError(pickle, problem)
    return Checkpoint(directory, dtype, device)


def weights_num_bytes(directory: Path, dtype: torch.dtype) -> int:
    """Return the bytes of all loaded tensors; `CheckpointError` as of `open_draft_weights`."""
    with open_draft_weights(directory, dtype, torch.device("cpu")) as checkpoint:
        return checkpoint.num_bytes_loaded("")


def draft_dtype(config: RunnerConfig) -> torch.dtype:
    """Return what the drafts of the model that runs by `config` are computed in."""
    device = torch.device(config.device)
    return choose_draft_dtype(choose_dtype(config.dtype, read_model_config(config.model).dtype, device), device)


def rows_num_bytes(config: RunnerConfig, model: ModelConfig) -> int:
    """Return what the rows of another runner take: penalty counts, and the logits of its graphs, which are as large."""
    return 2 * 4 * config.max_num_seqs * model.vocab_size
