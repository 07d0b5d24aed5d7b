"""Prompt lookup: a text goes on as it did where its last tokens occurred before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Recipe, Settings

if TYPE_CHECKING:
    from gpu_worker.execution.build import BuiltRunner
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner_config import RunnerConfig


class NgramRecipe(Recipe):
    """Needs nothing of the model."""

    name = "ngram"
    help = "looks them up in the request's own text"
    drafts_predictions = True

    def build(self, settings: Settings, config: RunnerConfig, runner: BuiltRunner) -> Proposer:
        """Make the proposer."""
        from gpu_worker.speculative.ngram.proposer import NgramProposer

        return NgramProposer()
