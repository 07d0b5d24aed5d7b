"""How the head that a checkpoint holds beside its model is found, counted and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Needs, Recipe, Settings
from shared.config import variable_name
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.models.config import ModelConfig

_REMEDY = "set it to ngram, or to off"


class MtpRecipe(Recipe):
    """Loads the head from the model's own files, with a KV cache of as many blocks as the model's."""

    name = "mtp"
    help = "has the head make them that the checkpoint holds for this (MTP, NextN)"

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the sizes of the head and of its entries beside each block.

        Raises:
            ConfigError: The checkpoint has no head.
        """
        import torch

        from gpu_worker.execution.memory.kv_cache import bytes_per_block
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.mtp.head import head_config, open_head
        from gpu_worker.speculative.sizes import draft_dtype

        model, dtype = read_model_config(config.model), draft_dtype(config)
        _check_counted(model)
        head = model.draft_head
        assert head is not None
        with open_head(config.model, model, dtype, torch.device("cpu")) as weights:
            name = f"{head.prefix}.{head.hidden_norm}.weight"
            if not weights.has(name):
                counted = f", although {head.field} counts {head.count}" if head.count else ""
                problem = f"{config.model} has no tensor {name!r}{counted}; tools that save a model often leave it out"
                raise _error(f"{problem}. Serve the original checkpoint")
            num_bytes = weights.num_bytes_loaded("")
        return Needs(num_bytes, bytes_per_block(config.block_size, head_config(model), dtype))

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Load the head, and allocate its cache."""
        from gpu_worker.execution.runner_config import choose_draft_dtype
        from gpu_worker.speculative.hidden_vectors.proposer import propose_by
        from gpu_worker.speculative.mtp.head import load_head

        model = runner.model
        head = load_head(config.model, model, choose_draft_dtype(model.dtype, model.device))
        return propose_by(head, config, runner)


def _check_counted(model: ModelConfig) -> None:
    """Refuse a model that says, or whose family says, that it has no head."""
    from gpu_worker.models.draft_head import MTP_FIELD, NEXTN_FIELD

    head = model.draft_head
    if head is None:
        fields = f"neither {NEXTN_FIELD} nor {MTP_FIELD} means anything there"
        raise _error(f"such a head is not read from this checkpoint ({model.architecture}): {fields}")
    if head.count == 0:
        raise _error(f"{head.field} in config.json counts no such head")


def _error(problem: str) -> ConfigError:
    return ConfigError(variable_name("speculative"), f"is {MtpRecipe.name}, but {problem}; {_REMEDY}")
