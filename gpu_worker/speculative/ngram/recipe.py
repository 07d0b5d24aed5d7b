"""How prompt lookup is counted and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Needs, Recipe, Settings

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig


class NgramRecipe(Recipe):
    """Indexes as many tokens as the KV cache holds."""

    name = "ngram"
    help = "looks them up in the request's own text"
    drafts_predictions = True

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the memory of the indexes, which lie in the memory of the host."""
        from gpu_worker.speculative.ngram.index import BYTES_PER_TOKEN

        return Needs(block_bytes=config.block_size * BYTES_PER_TOKEN if config.device == "cpu" else 0)

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Make the proposer."""
        from gpu_worker.speculative.ngram.proposer import NgramProposer

        return NgramProposer(runner.num_blocks * runner.block_size)
