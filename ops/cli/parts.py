"""Checks that the packages of a part of Headrace are installed, and that this machine has the device to compute on."""

from __future__ import annotations

import importlib.util

from ops.cli.interrupts import import_interruptibly
from shared.errors import ConfigError, DependencyError


def require(extra: str, *packages: str) -> None:
    """Check that the packages of an extra are there, and import PyTorch if it is one of them.

    Raises:
        DependencyError: Some are missing; the message says how to install them.
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyError(f"{', '.join(missing)} not installed: `pip install 'headrace[{extra}]'`.")
    if "torch" in packages:
        import_interruptibly("torch")


def check_device(name: str) -> None:
    """Check that this machine has a device: `cpu`, `cuda`, or one of several, as `cuda:1`.

    Raises:
        ConfigError: There is none of this name.
    """
    import torch

    num_devices = torch.cuda.device_count()
    allowed = ["cpu", *(["cuda"] if num_devices else []), *(f"cuda:{index}" for index in range(num_devices))]
    if name not in allowed:
        raise ConfigError("HEADRACE_DEVICE", f"is {name!r}; this machine has: {', '.join(allowed)}")
