"""How self-speculation is checked, counted and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Needs, Recipe, Settings
from shared.config import variable_name
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig

_LAYERS = "self_speculation_layers"


class SelfSpeculationRecipe(Recipe):
    """Runs the first layers on the model's own weights and KV cache."""

    name = "self"
    help = "has the model's first layers make them"
    options = (_LAYERS,)

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the memory of a second runner's rows."""
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.sizes import rows_num_bytes

        model = read_model_config(config.model)
        if model.has_states:
            raise ConfigError(
                variable_name("speculative"),
                f"is {self.name}, but the model's recurrent layers ({model.architecture}) would remember the drafts of "
                "its first layers; set it to ngram, or to off",
            )
        return Needs(num_bytes=rows_num_bytes(config, model))

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Make a runner of the first layers, and the proposer."""
        from gpu_worker.speculative.self_speculation.proposer import SelfSpeculationProposer

        num_layers = _num_layers(settings.self_speculation_layers, runner.model_config.num_layers)
        return SelfSpeculationProposer(runner.early_exit(num_layers))


def _num_layers(requested: int | None, most: int) -> int:
    if requested is None:
        return max(1, round(most / 4))
    if requested > most:
        problem = f"is {requested}, but the model has {most} layers; about a quarter of them is usual"
        raise ConfigError(variable_name(_LAYERS), problem)
    return requested
