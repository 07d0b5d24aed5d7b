"""Sets up the proposer of drafts that the settings ask for, by its recipe."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.core.draft import MAX_DRAFT_TOKENS
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.speculative.registry import DRAFT_MODEL, RECIPES, Recipe, find_recipe, recipe_of_weights
from gpu_worker.start.config import WorkerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.config import variable_name
from shared.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig

_SPECULATIVE = variable_name("speculative")
_DRAFT_MODEL = variable_name(DRAFT_MODEL)


def check_speculation(config: WorkerConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse settings of speculation that do not go together, before anything is loaded.

    Raises:
        ConfigError: A draft model is missing, not wanted, not usable, of another kind, or has another vocabulary.
    """
    recipe = find_recipe(config.speculative)
    if config.simulate is not None and recipe is not None:
        raise ConfigError(_SPECULATIVE, f"is {recipe.name}, but a simulated engine has no model")
    if recipe is None or recipe.weights is None:
        _check_no_weights(config)
    else:
        _check_weights(recipe, recipe.weights, config.draft_model)
    if recipe is not None:
        recipe.check(config, partial(_has_vocabulary_of, tokenizer))


def with_room_for_proposer(config: WorkerConfig, runner_config: RunnerConfig) -> RunnerConfig:
    """Return the settings of the model's runner with the drafts that it verifies and what their proposer needs.

    Raises:
        ConfigError: A file of the draft weights is missing or damaged, or is for another model.
    """
    recipe = find_recipe(config.speculative)
    if recipe is None:
        return runner_config
    try:
        needs = recipe.needs(config, runner_config)
    except HeadraceError as error:
        raise _about_weights(error, recipe) from error
    return dataclasses.replace(
        runner_config,
        max_draft_tokens=min(config.num_speculative_tokens, MAX_DRAFT_TOKENS),
        proposer_bytes=needs.num_bytes,
        proposer_block_bytes=needs.block_bytes,
        tapped_layers=needs.tapped_layers,
    )


def build_proposer(config: WorkerConfig, runner_config: RunnerConfig, runner: TorchModelRunner) -> Proposer:
    """Build the proposer; `ConfigError` if its weights cannot be loaded, or do not belong to the model."""
    recipe = find_recipe(config.speculative)
    assert recipe is not None
    try:
        return recipe.build(config, runner_config, runner)
    except HeadraceError as error:
        raise _about_weights(error, recipe) from error


def _check_no_weights(config: WorkerConfig) -> None:
    if config.draft_model is not None:
        needed = _either([recipe.name for recipe in RECIPES if recipe.weights])
        raise ConfigError(_DRAFT_MODEL, f"is set, but {_SPECULATIVE} is {config.speculative}; set it to {needed}")


def _check_weights(recipe: Recipe, weights: str, directory: Path | None) -> None:
    if directory is None:
        raise ConfigError(_DRAFT_MODEL, f"is needed with {_SPECULATIVE}={recipe.name}: the directory of {weights}")
    if not directory.exists():
        raise ConfigError(_DRAFT_MODEL, f"{directory} is not a directory of a model; give that of {weights}")
    try:
        found = recipe_of_weights(directory)
    except HeadraceError as error:
        raise _about_weights(error, recipe) from error
    if found is not recipe:
        problem = f"{directory} holds {found.weights}, but {_SPECULATIVE} is {recipe.name}; set that to {found.name}"
        raise ConfigError(_DRAFT_MODEL, f"{problem}, or give the directory of {weights}")


def _has_vocabulary_of(tokenizer: ModelTokenizer, directory: Path) -> bool:
    try:
        return tokenizer.has_vocabulary_of(ModelTokenizer(read_model_directory(directory)))
    except ConfigError as error:
        raise ConfigError(_DRAFT_MODEL, error.problem) from error


def _about_weights(error: HeadraceError, recipe: Recipe) -> ConfigError:
    variable = variable_name("model") if recipe.weights is None else _DRAFT_MODEL
    return error if isinstance(error, ConfigError) else ConfigError(variable, str(error))


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
