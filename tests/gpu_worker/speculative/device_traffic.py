"""Counts what would make the host wait for a GPU, and what would be carried to it, while code runs on a CPU.

All tensors count as the device's but those that a `Download` has handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Values
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.transfers import Download, Upload

_READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "equal"}
"""Functions that hand numbers of a tensor to Python, or whose result has a size that depends on them."""

_CREATIONS = {"tensor", "as_tensor", "from_numpy"}
"""Functions that make a tensor of the host's numbers: on a GPU, a copy that waits."""


@dataclass
class Traffic:
    """What happened.

    Attributes:
        reads: Names of the functions that read a tensor of the device.
        copies: Names of those that carried numbers to it outside of an upload.
        num_uploads: Uploads that carried something.
        num_downloads: Downloads that were waited for.
    """

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    num_uploads: int = 0
    num_downloads: int = 0


class _Recorder(TorchFunctionMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.hosts: list[torch.Tensor] = []
        self.is_sending = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Values[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_read = name in _READS and not self.is_sending
        if is_read and not any(args[0].data_ptr() == host.data_ptr() for host in self.hosts):
            self.traffic.reads.append(name)
        indexed = name == "__getitem__" and isinstance(args[1], list)
        if (name in _CREATIONS or indexed) and not self.is_sending:
            self.traffic.copies.append(name)
        result = func(*args, **(kwargs or {}))
        if name == "transpose" and any(args[0].data_ptr() == host.data_ptr() for host in self.hosts):
            self.hosts.append(result)
        return result


@contextmanager
def recorded_traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count while the block runs."""
    traffic = Traffic()
    recorder = _Recorder(traffic)
    init, send, wait, tables = Upload.__init__, Upload.send, Download.wait, BatchRows.block_tables

    def copying_init(upload: Upload, device: torch.device, *, is_copied: bool | None = None) -> None:
        init(upload, device, is_copied=True)

    def counted_send(upload: Upload) -> None:
        traffic.num_uploads += upload.num_bytes > 0
        recorder.is_sending = True
        send(upload)
        recorder.is_sending = False

    def device_tables(rows: BatchRows, numbers: torch.Tensor) -> torch.Tensor:
        # A CPU looks them up in the host's own tables, a GPU in those on the device.
        recorder.is_sending = True
        found = tables(rows, numbers)
        recorder.is_sending = False
        return found

    def counted_wait(download: Download) -> list[torch.Tensor]:
        traffic.num_downloads += 1
        recorder.hosts += (hosts := wait(download))
        return hosts

    with monkeypatch.context() as patch, recorder:
        patch.setattr(Upload, "__init__", copying_init)
        patch.setattr(Upload, "send", counted_send)
        patch.setattr(BatchRows, "block_tables", device_tables)
        patch.setattr(Download, "wait", counted_wait)
        yield traffic
