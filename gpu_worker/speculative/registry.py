"""The proposers that a worker can be set to, and how each is recognised, checked, counted and built.

A new one is a folder, and its recipe here. Recipes are read with the settings: what needs torch is imported where it is
used.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from shared.config import variable_name
from shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.models.config import ModelConfig
    from gpu_worker.speculative.draft_files import DraftFiles


DRAFT_MODEL = "draft_model"
"""The setting that names the directory of a proposer's weights."""
_WITHOUT_HEAD = "set it to ngram, or to off"


class Settings(Protocol):
    """Those of the worker's settings that recipes read."""

    @property
    def draft_model(self) -> Path | None:
        """Directory of the proposer's weights."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the model's runner must leave to the proposer, in the memory that the KV cache lies in.

    Attributes:
        num_bytes: Whatever the size of the KV cache.
        block_bytes: For each block of the KV cache.
        tapped_layers: Layers of the model whose residual streams the proposer reads.
    """

    num_bytes: int = 0
    block_bytes: int = 0
    tapped_layers: tuple[int, ...] = ()


class Recipe(ABC):
    """How a proposer is set up.

    Attributes:
        name, help: Its value of the setting `speculative`, and that value's part of the description.
        weights: What the directory in `draft_model` holds; None where it has no weights of its own.
        drafts_predictions: Drafts are taken from predictions of the output that clients send.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    weights: ClassVar[str | None] = None
    drafts_predictions: ClassVar[bool] = False

    def recognizes(self, files: DraftFiles) -> bool:
        """Whether a directory holds this proposer's weights, asked in order; `HeadraceError` if a file is damaged."""
        return False

    # Not abstract: most have nothing to check.
    def check(self, settings: Settings, has_vocabulary_of: Callable[[Path], bool]) -> None:  # noqa: B027
        """Raise `ConfigError` for what cannot work, before anything is loaded.

        `has_vocabulary_of` tells whether the served model turns text into the same token ids as that of a directory.
        """

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return what to leave to the proposer of a model that runs by `config`; may raise `HeadraceError`."""
        return Needs()

    @abstractmethod
    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Load what the proposer needs, and make it; `runner` runs the model that verifies the drafts."""


class NgramRecipe(Recipe):
    """Indexes as many tokens as the KV cache holds."""

    name = "ngram"
    help = "looks them up in the request's own text"
    drafts_predictions = True

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the memory of the indexes, which lie in the memory of the host."""
        from gpu_worker.speculative.ngram.proposer import BYTES_PER_TOKEN

        return Needs(block_bytes=config.block_size * BYTES_PER_TOKEN if config.device == "cpu" else 0)

    def build(self, settings: Settings, config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
        """Make the proposer."""
        from gpu_worker.speculative.ngram.proposer import NgramProposer

        return NgramProposer(runner.num_blocks * runner.block_size)


class MtpRecipe(Recipe):
    """Loads the head from the model's own files, with a KV cache of as many blocks as the model's."""

    name = "mtp"
    help = "has the head make them that the checkpoint holds for this (MTP, NextN)"

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the sizes of the head and of its entries of a block; `ConfigError` if there is no head."""
        import torch

        from gpu_worker.execution.memory.kv_cache import bytes_per_block
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.draft_files import draft_dtype
        from gpu_worker.speculative.mtp.head import head_config, open_head

        model, dtype = read_model_config(config.model), draft_dtype(config)
        _check_head_counted(model)
        head = model.draft_head
        assert head is not None
        with open_head(config.model, model, dtype, torch.device("cpu")) as weights:
            name = f"{head.prefix}.{head.hidden_norm}.weight"
            if not weights.has(name):
                counted = f", although {head.field} counts {head.count}" if head.count else ""
                problem = f"{config.model} has no tensor {name!r}{counted}; tools that save a model often leave it out"
                raise _head_error(f"{problem}. Serve the original checkpoint")
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


def _check_head_counted(model: ModelConfig) -> None:
    """Refuse a model that says, or whose family says, that it has no head."""
    from gpu_worker.models.draft_head import MTP_FIELD, NEXTN_FIELD

    head = model.draft_head
    if head is None:
        fields = f"neither {NEXTN_FIELD} nor {MTP_FIELD} means anything there"
        raise _head_error(f"such a head is not read from this checkpoint ({model.architecture}): {fields}")
    if head.count == 0:
        raise _head_error(f"{head.field} in config.json counts no such head")


def _head_error(problem: str) -> ConfigError:
    return ConfigError(variable_name("speculative"), f"is {MtpRecipe.name}, but {problem}; {_WITHOUT_HEAD}")


class EagleRecipe(Recipe):
    """Loads the layer beside the model, with a KV cache of as many blocks as the model's."""

    name = "eagle"
    help = "has a layer make them that was trained for the model"
    weights = "an EAGLE layer, which was trained for the model"

    def recognizes(self, files: DraftFiles) -> bool:
        """Look at the configuration, and for the projection that only such a layer has."""
        from gpu_worker.speculative.eagle.layer import is_third

        return files.config is not None and (is_third(files.config) or files.has_tensor("fc.weight"))

    def needs(self, settings: Settings, config: RunnerConfig) -> Needs:
        """Return the sizes of the layer and of its entries beside each block, and what it reads of the model."""
        from gpu_worker.execution.memory.kv_cache import bytes_per_block
        from gpu_worker.models.json_file import JsonFile
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.draft_files import draft_dtype, weights_num_bytes
        from gpu_worker.speculative.eagle.layer import read_eagle_config

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
        from gpu_worker.models.loader import weights_bytes
        from gpu_worker.models.registry import read_model_config
        from gpu_worker.speculative.draft_files import rows_num_bytes

        assert settings.draft_model is not None
        draft = read_model_config(settings.draft_model)
        if draft.has_states:
            raise ConfigError(
                variable_name(DRAFT_MODEL),
                f"{settings.draft_model} has recurrent layers ({draft.architecture}), which cannot take drafts back; "
                "give a smaller model with attention alone, or set HEADRACE_SPECULATIVE to ngram",
            )
        dtype, device = _draft_model_dtype(draft, config)
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
        dtype, _ = _draft_model_dtype(draft, config)
        draft_config = dataclasses.replace(
            # Of several ranks the first one makes the drafts, with all of the smaller model.
            config.undivided(),
            model=directory,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            # The model's cache has left room for as many.
            num_blocks=runner.num_blocks,
            keeps_all_tokens=True,
            # Its sequences are text without adapters, whatever those of the model have.
            takes_images=False,
            max_loras=0,
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


def _draft_model_dtype(draft: ModelConfig, config: RunnerConfig) -> tuple[torch.dtype, torch.device]:
    """Return the smaller model's type and device: on a CPU the type that is fast there, whatever the model takes."""
    import torch

    from gpu_worker.execution.runner_config import choose_dtype
    from gpu_worker.speculative.draft_files import draft_dtype

    device = torch.device(config.device)
    return draft_dtype(config) if device.type == "cpu" else choose_dtype(config.dtype, draft.dtype, device), device


RECIPES: tuple[Recipe, ...] = (
    NgramRecipe(),
    MtpRecipe(),
    EagleRecipe(),
    # Any model can be one: asked last what a directory holds.
    DraftModelRecipe(),
)


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of this name; None where nothing proposes drafts."""
    return next((recipe for recipe in RECIPES if recipe.name == name), None)


def recipe_of_weights(directory: Path) -> Recipe:
    """Return the recipe whose weights a directory holds; `HeadraceError` if a file is missing or damaged."""
    from gpu_worker.speculative.draft_files import DraftFiles

    files = DraftFiles.read(directory)
    return next(recipe for recipe in RECIPES if recipe.recognizes(files))


def describe_proposers() -> str:
    """Return what each does, for the help of a setting."""
    return "; ".join(f"{recipe.name} {recipe.help}" for recipe in RECIPES)


def describe_weights() -> str:
    """Return what the directory of weights holds, for the help of a setting."""
    return "; ".join(f"{recipe.name}: {recipe.weights}" for recipe in RECIPES if recipe.weights)
