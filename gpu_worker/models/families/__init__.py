"""The model families that can be served, a file each: `ARCHITECTURE` and `read_config(file) -> ModelConfig`.

A family whose checkpoints have several names in `architectures` has the others in `ALSO`. One whose reader needs fields
that `support_page.SAMPLE` has not, or whose row there should show an option, has them in a `SAMPLE` of its own.

A file in this folder is a family: nothing else lists them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile

ReadConfig = Callable[[JsonFile], ModelConfig]


def family_modules() -> list[ModuleType]:
    """Return the families' own modules."""
    return [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]


def find_families() -> Mapping[str, ReadConfig]:
    """Return how the configuration of each family is read, by the name that checkpoints give in `architectures`."""
    modules = family_modules()
    named = {name: module for module in modules for name in (module.ARCHITECTURE, *getattr(module, "ALSO", ()))}
    return MappingProxyType({name: module.read_config for name, module in sorted(named.items())})
