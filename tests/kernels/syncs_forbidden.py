"""Finds what would wait for the device in a step, which no captured step may do: on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "equal", "is_nonzero"}


class SyncsForbidden(TorchDispatchMode):
    """While it is entered, an operator raises whose result's shape, or a number of Python, depends on values."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else ()
        has_mask = any(mask is not None and mask.dtype is torch.bool for mask in masks)
        assert name not in _WAITING, f"{name} waits for the device"
        assert not has_mask, f"{name} by a mask waits for the device"
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))
