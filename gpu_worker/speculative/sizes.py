"""What proposers compute in, and the sizes that follow from the settings of the model's runner."""

from __future__ import annotations

import torch

from gpu_worker.execution.runner_config import RunnerConfig, choose_draft_dtype, choose_dtype
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config


def draft_dtype(config: RunnerConfig) -> torch.dtype:
    """Return what the drafts of the model that runs by `config` are computed in."""
    device = torch.device(config.device)
    return choose_draft_dtype(choose_dtype(config.dtype, read_model_config(config.model).dtype, device), device)


def rows_num_bytes(config: RunnerConfig, model: ModelConfig) -> int:
    """Return what the rows of another runner take: penalty counts, and the logits of its graphs, which are as large."""
    return 2 * 4 * config.max_num_seqs * model.vocab_size
