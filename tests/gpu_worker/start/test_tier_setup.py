"""Tiers that cannot be are refused before a model is loaded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpu_worker.execution.memory.state_sizes import CHECKPOINT_TOKENS
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.ended_thread import run_in_ended_thread
from gpu_worker.start.tier_setup import build_tiers, check_tiers, made_once
from shared.errors import ConfigError
from tests.gpu_worker.execution.tiered_engine import BLOCK, Models
from tests.gpu_worker.start.test_speculation_on_device import MB, Machine, generate


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


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", [BLOCK, BLOCK]), ("qwen3_5", [BLOCK, CHECKPOINT_TOKENS])])
def test_files_know_how_much_is_computed_for_a_content_of_each_kind(
    name: str, tokens: list[int], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runner = Models(tmp_path_factory).open(name)
    asked = {"kv_disk_path": str(tmp_path), "kv_host_bytes": 1 << 22}
    assert build_tiers(WorkerConfig(model=Path("x")), runner) is None
    tiers = build_tiers(WorkerConfig(model=Path("x"), **asked), runner)
    assert tiers is not None
    assert tiers._files is not None
    assert tiers._files._tokens == tokens


def test_weights_are_read_once_for_all_tiers() -> None:
    may_end = threading.Event()
    make = Mock(side_effect=lambda: may_end.wait(10) and object())
    get = made_once(make)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(get) for _ in range(2)]
        may_end.set()
    assert made[0].result() is made[1].result()
    assert make.call_count == 1


def test_thread_has_ended_when_the_result_is_there() -> None:
    thread = run_in_ended_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_error_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_ended_thread(lambda: 1 // 0)


def test_model_of_a_gpu_is_built_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, threads = Machine(monkeypatch, 100 * MB), []
    build = machine._build

    def built(*settings: object, **parts: object) -> object:
        threads.append(threading.current_thread())
        return build(*settings, **parts)

    monkeypatch.setattr(machine, "_build", built)
    generate()
    [thread] = threads
    assert thread.name == "build"
    assert not thread.is_alive()
