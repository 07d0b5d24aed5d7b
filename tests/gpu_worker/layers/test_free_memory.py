from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from gpu_worker.layers.free_memory import address_space_free_bytes, control_group_free_bytes, free_host_bytes

GIB = 1 << 30


def test_free_memory_is_plausible() -> None:
    assert 1 << 24 < free_host_bytes() < 1 << 50


def test_files_read_lately_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file 12\n")
    assert control_group_free_bytes(tmp_path) == 6 * GIB


@pytest.mark.parametrize("limit", ["max\n", ""])
def test_control_group_without_a_limit_bounds_nothing(tmp_path: Path, limit: str) -> None:
    for name, text in {"memory.max": limit, "memory.current": "1", "memory.stat": "inactive_file 0"}.items():
        (tmp_path / name).write_text(text)
    assert control_group_free_bytes(tmp_path) > 1 << 60
    assert control_group_free_bytes(tmp_path / "absent") > 1 << 60


def test_limit_of_addresses_counts_what_is_mapped_already(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (mapped + GIB, mapped + GIB))
    assert abs(address_space_free_bytes() - GIB) < GIB / 8
    assert free_host_bytes() <= address_space_free_bytes()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (mapped // 2, mapped))
    assert address_space_free_bytes() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert address_space_free_bytes() > 1 << 60
