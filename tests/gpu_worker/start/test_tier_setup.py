"""Tiers that cannot be are refused before a model is loaded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.tier_setup import check_tiers, made_once
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"simulate": 1.0}, "a simulated engine keeps no keys and values"),
        ({"enable_prefix_caching": False}, "HEADRACE_ENABLE_PREFIX_CACHING turns off"),
        ({"tensor_parallel_size": 2}, "divided among several ranks"),
        ({"pipeline_parallel_size": 2}, "divided among several ranks"),
        ({"kv_host_bytes": 1 << 60}, "bytes of memory are wanted, and "),
    ],
)
def test_tiers_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    config = WorkerConfig(**{"model": Path("x"), "kv_host_bytes": 1 << 20, **settings})
    with pytest.raises(ConfigError, match=problem):
        check_tiers(config)


def test_without_tiers_nothing_is_refused() -> None:
    check_tiers(WorkerConfig(model=Path("x"), simulate=1.0, tensor_parallel_size=2))


def test_weights_are_read_once_for_all_tiers() -> None:
    may_end = threading.Event()
    make = Mock(side_effect=lambda: may_end.wait(10) and object())
    get = made_once(make)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(get) for _ in range(2)]
        may_end.set()
    assert made[0].result() is made[1].result()
    assert make.call_count == 1
