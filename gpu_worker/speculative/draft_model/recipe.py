"""How a draft model is checked, counted and built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import DRAFT_MODEL, Needs, Recipe, Settings
from shared.config import variable_name
from shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.models.config import ModelConfig
    from gpu_worker.speculative.draft_files import DraftFiles


class DraftModelRecipe(Recipe):
    """Runs the smaller model as the model itself is run, with a KV cache of as many blocks.

    So a sequence that fits one cache fits the other. Its steps need no memory of their own: they run between the
    model's, whose largest step is larger.
    """

    name = "draft"
    help = "has a smaller model make them, of the same tokenizer"
    weights = "a smaller model"

    def recognizes(self, files: DraftFiles) -> bool:
        """Say yes: whatever is nothing else."""
        return True

    def check(self, settings: Settings, has_vocabulary_of: Callable[[Path], bool]) -> None:
        """Compare the vocabularies."""
        directory = settings.draft_model
        assert directory is not None
        if not has_vocabulary_of(directory):
            raise ConfigError(
                variable_name(DRAFT_MODEL),
                f"{directory} has another vocabulary than the model; both must turn text into the same token ids. "
                "Take a smaller model of the same family",
            )

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the sizes of its weights and rows, and of its share of each block."""
        from gpu_worker.execution.memory.kv_cache import bytes_per_block
        from gpu_worker.execution.runner_config import choose_kv_cache_dtype
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.models.weights_size import weights_bytes
        from gpu_worker.speculative.sizes import rows_num_bytes

        assert settings.draft_model is not None
        draft = read_model_config(settings.draft_model)
        if draft.has_states:
            raise ConfigError(
                variable_name(DRAFT_MODEL),
                f"{settings.draft_model} has recurrent layers ({draft.architecture}), which cannot take drafts back; "
                "give a smaller model with attention alone, or set HEADRACE_SPECULATIVE to ngram",
            )
        dtype, device = _dtype(draft, config)
        weights = weights_bytes(
            settings.draft_model, dtype, device, is_tied=draft.tie_word_embeddings, names=draft.block.names
        )
        kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
        rows = rows_num_bytes(config, draft)
        return Needs(weights + rows, bytes_per_block(config.block_size, draft, kv_cache_dtype))

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Build its runner."""
        from gpu_worker.execution.build import build_runner
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.draft_model.proposer import DraftModelProposer

        directory = settings.draft_model
        assert directory is not None
        draft = read_model_config(directory)
        max_model_len = min(draft.max_model_len, config.max_model_len or draft.max_model_len)
        dtype, _ = _dtype(draft, config)
        draft_config = dataclasses.replace(
            config,
            model=directory,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            # The model's cache has left room for as many.
            num_blocks=runner.num_blocks,
            keeps_all_tokens=True,
            # Of several ranks the first one makes the drafts, with all of the smaller model.
            tensor_parallel_size=1,
            enable_expert_parallel=False,
        )
        try:
            draft_runner = build_runner(draft_config)
        except ConfigError as error:
            problem = f"{directory} cannot run beside the model: {error}"
            raise ConfigError(variable_name(DRAFT_MODEL), problem) from error
        return DraftModelProposer(
            draft_runner,
            vocab_size=draft.vocab_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )


def _dtype(draft: ModelConfig, config: RunnerConfig) -> tuple[torch.dtype, torch.device]:
    """Return what the smaller model computes in: on a CPU what is fast there, whatever the model takes."""
    import torch

    from gpu_worker.execution.runner_config import choose_dtype
    from gpu_worker.speculative.sizes import draft_dtype

    device = torch.device(config.device)
    return draft_dtype(config) if device.type == "cpu" else choose_dtype(config.dtype, draft.dtype, device), device
