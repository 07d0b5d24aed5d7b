"""How an EAGLE layer is recognised, counted and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker.speculative.recipe import Needs, Recipe, Settings

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.speculative.draft_files import DraftFiles


class EagleRecipe(Recipe):
    """Loads the layer beside the model, with a KV cache of as many blocks as the model's."""

    name = "eagle"
    help = "has a layer make them that was trained for the model"
    weights = "an EAGLE layer, which was trained for the model"

    def recognizes(self, files: DraftFiles) -> bool:
        """Look at the configuration, and for the projection that only such a layer has."""
        from gpu_worker.speculative.eagle.config import is_third

        return files.config is not None and (is_third(files.config) or files.has_tensor("fc.weight"))

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the sizes of the layer and of its entries beside each block, and what it reads of the model."""
        from gpu_worker.execution.memory.kv_cache import bytes_per_block
        from gpu_worker.models.json_file import JsonFile
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.draft_files import weights_num_bytes
        from gpu_worker.speculative.eagle.config import read_eagle_config
        from gpu_worker.speculative.sizes import draft_dtype

        assert settings.draft_model is not None
        file = JsonFile.read(settings.draft_model / "config.json")
        eagle, dtype = read_eagle_config(file, read_model_config(config.model)), draft_dtype(config)
        return Needs(
            weights_num_bytes(settings.draft_model, dtype),
            bytes_per_block(config.block_size, eagle.layer, dtype),
            eagle.tapped_layers,
        )

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Load the layer, and allocate its cache."""
        from gpu_worker.execution.runner_config import choose_draft_dtype
        from gpu_worker.speculative.eagle.layer import load_eagle_layer
        from gpu_worker.speculative.hidden_vectors.proposer import propose_by

        assert settings.draft_model is not None
        model = runner.model
        layer = load_eagle_layer(settings.draft_model, model, choose_draft_dtype(model.dtype, model.device))
        return propose_by(layer, config, runner)
