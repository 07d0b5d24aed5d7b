"""Names of adapters: those of `--lora-modules`, and what may be one."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_worker.adapters.config import AdapterError
from shared.adapter_calls import MAX_ADAPTERS, is_digest
from shared.errors import ConfigError

VARIABLE = "HEADRACE_LORA_MODULES"
_MAX_NAME = 128


def parse_modules(text: str) -> dict[str, Path]:
    """Read `name=directory`, several by commas or white space; `ConfigError` if malformed or a name is repeated."""
    modules: dict[str, Path] = {}
    for item in re.split(r"[,\s]+", text.strip(", \t\n")):
        name, separator, directory = item.partition("=")
        if not (name and separator and directory):
            raise ConfigError(VARIABLE, f"has {item[:80]!r}; each adapter is name=directory")
        try:
            check_name(name)
        except AdapterError as error:
            raise ConfigError(VARIABLE, str(error)) from None
        if name in modules:
            raise ConfigError(VARIABLE, f"has {name!r} twice")
        modules[name] = Path(directory)
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(VARIABLE, f"has {len(modules)} adapters; at most {MAX_ADAPTERS} are served")
    return modules


def check_name(name: str) -> None:
    """Refuse names that are too long or read as a digest does, with `AdapterError`."""
    if not 1 <= len(name) <= _MAX_NAME or is_digest(name):
        problem = f"has 1 to {_MAX_NAME} characters and is not a digest"
        raise AdapterError(f"an adapter cannot have the name {name[:80]!r}; one {problem}")
