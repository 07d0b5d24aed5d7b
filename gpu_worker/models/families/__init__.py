"""The model families that can be served.

A file in this folder describes relatives in `FAMILIES`; no other file lists them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import with_defaults

ReadConfig = Callable[[JsonFile], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        architecture, also: Its names in the `architectures` of checkpoints.
        read: Reads a configuration. A field that is missing, of the wrong type or not served is a `CheckpointError`.
        defaults: What absent fields mean, where the reader means something else; null fields are not absent.
        sample: Fields that the reader needs and `tests.gpu_worker.models.support_page.SAMPLE` lacks.
    """

    architecture: str
    read: Callable[[JsonFile], ModelConfig]
    sample: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read_config(self, file: JsonFile) -> ModelConfig:
        """Read a configuration."""
        return replace(self.read(with_defaults(file, self.defaults)), architecture=self.architecture)


def families() -> list[Family]:
    """Return all families."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return [family for module in modules for family in module.FAMILIES]


def find_families() -> Mapping[str, ReadConfig]:
    """Return how the configuration of each family is read, by the name that checkpoints give in `architectures`."""
    named = {name: family for family in families() for name in (family.architecture, *family.also)}
    return {name: family.read_config for name, family in sorted(named.items())}
