from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.execution.batch.transfers import Downloads, Upload
from tests.gpu_worker.execution.device_runs import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize("is_copied", [True, None])
def test_arrays_of_all_kinds_arrive_aligned(device: torch.device, is_copied: bool | None) -> None:
    arrays = [
        np.arange(3, dtype=np.int32),
        np.array([], dtype=np.int64),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.array([2**62, -1], dtype=np.int64),
    ]
    upload = Upload(device, is_copied=is_copied)
    staged = [upload.add(array) for array in arrays]
    seen: list[list[int]] = []
    upload.on_arrival(lambda: seen.append(staged[0].tensor.tolist()))
    upload.send()
    assert seen == [[0, 1, 2]]
    for array, each in zip(arrays, staged, strict=True):
        assert each.tensor.device.type == device.type
        assert each.tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert each.tensor.tolist() == array.tolist()
        assert each.tensor.data_ptr() % 16 == 0
        assert each.tensor.is_contiguous()


def test_upload_into_bound_memory_shows_in_its_tensors(device: torch.device) -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8, device=device)
    first = Upload(device, is_copied=True)
    bound = [first.add(np.zeros(5, dtype=np.int32)), first.add(np.zeros(2, dtype=np.int64))]
    first.bind(buffer)
    second = Upload(device, is_copied=True)
    second.add(np.arange(5, dtype=np.int32))
    second.add(np.array([7, 8], dtype=np.int64))
    second.send_into(buffer)
    assert [each.tensor.tolist() for each in bound] == [[0, 1, 2, 3, 4], [7, 8]]


def test_empty_upload_only_acts(device: torch.device) -> None:
    upload, acted = Upload(device), []
    upload.on_arrival(lambda: acted.append(True))
    upload.send()
    assert acted == [True]


def test_downloads_return_what_was_computed_before_they_started(device: torch.device) -> None:
    downloads = Downloads(device)
    values = torch.zeros(1000, device=device)
    pending = []
    for _ in range(20):
        values = values + 1
        pending.append(downloads.start([values, values[:2] * 2]))
    for number, download in enumerate(pending, start=1):
        whole, twice = download.wait()
        assert whole.device.type == "cpu"
        assert whole.tolist() == [number] * 1000
        assert twice.tolist() == [2 * number] * 2
