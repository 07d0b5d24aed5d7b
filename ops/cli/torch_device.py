"""Checks the device that a command is told to compute on."""

from __future__ import annotations

from shared.errors import ConfigError


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
