from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.execution.kv_cache import fixed_num_blocks
from gpu_worker.execution.memory_budget import CacheDemand
from gpu_worker.execution.runner_config import RunnerConfig, choose_dtype, choose_num_threads, num_usable_cores
from shared.errors import ConfigError

CPU = torch.device("cpu")
DEMAND = CacheDemand(block_bytes=1 << 20, block_size=16, max_model_len=1000)


def config(**settings: object) -> RunnerConfig:
    return RunnerConfig(Path("model"), **settings)  # type: ignore[arg-type]


def test_set_sizes_win() -> None:
    assert fixed_num_blocks(config(num_blocks=70), DEMAND) == ("HEADRACE_NUM_BLOCKS", 70)
    assert fixed_num_blocks(config(kv_cache_bytes=100 << 20), DEMAND) == ("HEADRACE_KV_CACHE_BYTES", 100)
    assert fixed_num_blocks(config(num_blocks=70, kv_cache_bytes=1), DEMAND) == ("HEADRACE_NUM_BLOCKS", 70)
    assert fixed_num_blocks(config(), DEMAND) is None


@pytest.mark.parametrize(
    ("settings", "variable"),
    [({"num_blocks": 62}, "HEADRACE_NUM_BLOCKS"), ({"kv_cache_bytes": 62 << 20}, "HEADRACE_KV_CACHE_BYTES")],
)
def test_cache_smaller_than_one_sequence_is_refused(settings: dict[str, int], variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}.*{63 << 20} bytes.*HEADRACE_MAX_MODEL_LEN to 992"):
        fixed_num_blocks(config(**settings), DEMAND)


def test_cache_without_a_block_suggests_no_length() -> None:
    with pytest.raises(ConfigError, match=r"Allow 66060288 bytes \(63 blocks\)$"):
        fixed_num_blocks(config(kv_cache_bytes=5), DEMAND)


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
