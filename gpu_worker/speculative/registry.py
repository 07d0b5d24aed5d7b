"""The proposers that a worker can be set to. A new one is a folder with a `recipe.py`, and a line here."""

from __future__ import annotations

from pathlib import Path

from gpu_worker.speculative.draft_model.recipe import DraftModelRecipe
from gpu_worker.speculative.eagle.recipe import EagleRecipe
from gpu_worker.speculative.medusa.recipe import MedusaRecipe
from gpu_worker.speculative.mtp.recipe import MtpRecipe
from gpu_worker.speculative.ngram.recipe import NgramRecipe
from gpu_worker.speculative.recipe import Recipe
from gpu_worker.speculative.self_speculation.recipe import SelfSpeculationRecipe

RECIPES: tuple[Recipe, ...] = (
    NgramRecipe(),
    SelfSpeculationRecipe(),
    MtpRecipe(),
    MedusaRecipe(),
    EagleRecipe(),
    # Any model can be one: asked last what a directory holds.
    DraftModelRecipe(),
)


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of this name; None where nothing proposes drafts."""
    return next((recipe for recipe in RECIPES if recipe.name == name), None)


def recipe_of_weights(directory: Path) -> Recipe:
    """Return the recipe whose weights a directory holds.

    Raises:
        HeadraceError: A file is missing or damaged.
    """
    from gpu_worker.speculative.draft_files import DraftFiles

    files = DraftFiles.read(directory)
    return next(recipe for recipe in RECIPES if recipe.recognizes(files))


def describe_proposers() -> str:
    """Return what each does, for the help of a setting."""
    return "; ".join(f"{recipe.name} {recipe.help}" for recipe in RECIPES)


def describe_weights() -> str:
    """Return what the directory of weights holds, for the help of a setting."""
    return "; ".join(f"{recipe.name}: {recipe.weights}" for recipe in RECIPES if recipe.weights)
