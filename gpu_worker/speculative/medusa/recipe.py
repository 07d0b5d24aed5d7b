"""How Medusa heads are recognised, counted and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Needs, Recipe, Settings

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.speculative.draft_files import DraftFiles

_FIELDS = {"medusa_num_heads", "medusa_num_layers"}


class MedusaRecipe(Recipe):
    """Loads the heads beside the model."""

    name = "medusa"
    help = "has heads make them that were trained for the model"
    weights = "Medusa heads, which were trained for the model"

    def recognizes(self, files: DraftFiles) -> bool:
        """Look at the file's name and the configuration."""
        from gpu_worker.speculative.medusa.proposer import WEIGHTS_FILE

        config = files.config
        return config is not None and (
            (files.directory / WEIGHTS_FILE).exists()
            or bool(config.names() & _FIELDS)
            or config.text("model_type", "") == "medusa"
            or "MedusaModel" in config.texts("architectures")
        )

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the size of the heads."""
        from gpu_worker.speculative.draft_files import weights_num_bytes
        from gpu_worker.speculative.medusa.proposer import WEIGHTS_FILE
        from gpu_worker.speculative.sizes import draft_dtype

        assert settings.draft_model is not None
        return Needs(num_bytes=weights_num_bytes(settings.draft_model, draft_dtype(config), WEIGHTS_FILE))

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Load the heads."""
        from gpu_worker.execution.runner_config import choose_draft_dtype
        from gpu_worker.speculative.medusa.proposer import MedusaProposer, load_medusa_heads

        assert settings.draft_model is not None
        model = runner.model
        dtype = choose_draft_dtype(model.dtype, model.device)
        return MedusaProposer(load_medusa_heads(settings.draft_model, model, dtype))
