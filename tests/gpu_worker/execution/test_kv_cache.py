from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.execution.kv_cache import choose_num_blocks, free_memory_bytes
from gpu_worker.execution.runner_config import RunnerConfig, choose_dtype, choose_num_threads, num_usable_cores
from shared.errors import ConfigError

CPU = torch.device("cpu")
GIB = 1 << 30


def config(**settings: object) -> RunnerConfig:
    return RunnerConfig(Path("model"), **settings)  # type: ignore[arg-type]


def test_plenty_of_memory_gives_what_the_batch_can_use() -> None:
    assert choose_num_blocks(config(max_num_seqs=8), 1000, 1 << 16, 64 * GIB, "cpu") == 8 * 63


def test_little_memory_gives_a_quarter_of_it() -> None:
    assert choose_num_blocks(config(max_num_seqs=64), 1000, 1 << 20, GIB, "cpu") == 256


def test_set_sizes_win() -> None:
    assert choose_num_blocks(config(num_blocks=70), 1000, 1 << 20, GIB, "cpu") == 70
    assert choose_num_blocks(config(kv_cache_bytes=100 << 20), 1000, 1 << 20, GIB, "cpu") == 100


@pytest.mark.parametrize(
    ("settings", "variable"),
    [({"num_blocks": 62}, "HEADRACE_NUM_BLOCKS"), ({"kv_cache_bytes": 62 << 20}, "HEADRACE_KV_CACHE_BYTES")],
)
def test_cache_smaller_than_one_sequence_is_refused(settings: dict[str, int], variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}.*{63 << 20} bytes.*HEADRACE_MAX_MODEL_LEN to 992"):
        choose_num_blocks(config(**settings), 1000, 1 << 20, GIB, "cpu")


def test_free_memory_is_plausible() -> None:
    assert 1 << 24 < free_memory_bytes(CPU) < 1 << 50


def test_auto_dtype_on_a_cpu_never_runs_float16() -> None:
    assert choose_dtype("auto", torch.float16, CPU) == torch.float32
    assert choose_dtype("auto", torch.float32, CPU) == torch.float32
    assert choose_dtype("auto", torch.bfloat16, CPU) in (torch.bfloat16, torch.float32)
    assert choose_dtype("float16", torch.float32, CPU) == torch.float16


def test_auto_dtype_on_a_gpu_is_the_checkpoints() -> None:
    assert choose_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_DTYPE"):
        choose_dtype("int3", torch.float32, CPU)


def test_requested_threads_win_and_automatic_ones_fit_the_machine() -> None:
    assert choose_num_threads(7) == 7
    assert 1 <= choose_num_threads(None) <= num_usable_cores()
