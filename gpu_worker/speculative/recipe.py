"""What the `recipe.py` of a proposer offers to `start`: checks, memory needs, and how the proposer is built.

Recipes are read with the settings, long before torch is needed: what needs it is imported where it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from gpu_worker.execution.drafts.proposer import Proposer
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.speculative.draft_files import DraftFiles

DRAFT_MODEL = "draft_model"
"""The setting that names the directory of a proposer's weights."""


class Settings(Protocol):
    """Those of the worker's settings that recipes read."""

    @property
    def draft_model(self) -> Path | None:
        """Directory of the proposer's weights."""
        ...


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
