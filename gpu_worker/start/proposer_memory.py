"""What the model's runner must know of the proposer of drafts before either is loaded.

That is which layers it reads, and how much of a GPU's memory it will take, which is kept free for it. What scales with
the KV cache is counted to its blocks: a draft model's cache holds as many tokens as the model's own, so that a sequence
which fits one fits the other. Its steps need no memory of their own: they run between the model's, whose largest step
is larger.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.core.draft import MAX_GUESSES
from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from gpu_worker.execution.runner_config import RunnerConfig


def with_room_for_proposer(config: WorkerConfig, runner_config: RunnerConfig) -> RunnerConfig:
    """Return the settings of the model's runner with the drafts that it verifies and what their proposer needs.

    Raises:
        HeadraceError: A file of the draft weights is missing or damaged, or is for another model.
    """
    if config.speculative == "off":
        return runner_config
    fixed, per_block = 0, 0
    if runner_config.device != "cpu":
        fixed, per_block = _needs(config, runner_config)
    return dataclasses.replace(
        runner_config,
        max_draft_tokens=min(config.num_speculative_tokens, MAX_GUESSES),
        proposer_bytes=fixed,
        proposer_block_bytes=per_block,
        tapped_layers=_tapped_layers(config.draft_model, runner_config) if config.speculative == "eagle" else (),
    )


def _tapped_layers(directory: Path | None, runner_config: RunnerConfig) -> tuple[int, ...]:
    from gpu_worker.models.json_file import JsonFile
    from gpu_worker.models.registry import read_model_config
    from gpu_worker.speculative.eagle.config import read_eagle_config

    assert directory is not None
    try:
        file = JsonFile.read(directory / "config.json")
        return read_eagle_config(file, read_model_config(runner_config.model)).tapped_layers
    except HeadraceError as error:
        raise ConfigError("HEADRACE_DRAFT_MODEL", str(error)) from error


def _needs(config: WorkerConfig, runner_config: RunnerConfig) -> tuple[int, int]:
    """Return the bytes whatever the cache's size, and those for each of its blocks."""
    import torch

    from gpu_worker.execution.memory.kv_cache import bytes_per_block
    from gpu_worker.execution.runner_config import choose_dtype, choose_kv_cache_dtype
    from gpu_worker.models.json_file import JsonFile
    from gpu_worker.models.registry import read_model_config
    from gpu_worker.models.weights_size import weights_bytes
    from gpu_worker.speculative.draft_weights import open_draft_weights
    from gpu_worker.speculative.eagle.config import read_eagle_config

    kind, directory = config.speculative, config.draft_model
    device, block_size = torch.device(runner_config.device), runner_config.block_size
    model = read_model_config(runner_config.model)
    # Penalty counts of a runner's rows, and the logits of its graphs, which are as large.
    rows_bytes = 2 * 4 * runner_config.max_num_seqs * model.vocab_size
    if directory is None:
        return (rows_bytes if kind == "self" else 0), 0
    dtype = choose_dtype(runner_config.dtype, model.dtype, device)
    if kind == "draft":
        draft = read_model_config(directory)
        dtype = choose_dtype(runner_config.dtype, draft.dtype, device)
        kv_cache_dtype = choose_kv_cache_dtype(runner_config.kv_cache_dtype, dtype, device)
        weights = weights_bytes(directory, dtype, is_tied=draft.tie_word_embeddings)
        return weights + rows_bytes, bytes_per_block(block_size, draft, kv_cache_dtype)
    with open_draft_weights(directory, dtype, torch.device("cpu")) as checkpoint:
        weights = checkpoint.num_bytes_loaded("")
    if kind == "medusa":
        return weights, 0
    eagle = read_eagle_config(JsonFile.read(directory / "config.json"), model)
    return weights, bytes_per_block(block_size, eagle.layer, dtype)
