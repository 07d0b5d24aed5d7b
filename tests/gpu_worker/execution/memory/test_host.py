from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.memory.host import check_host_weights_fit, host_num_blocks
from shared.errors import ConfigError

GIB = 1 << 30


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAKE_A_TENSOR = """
import torch
from gpu_worker.execution.memory.host import ask_for_huge_pages
ask_for_huge_pages()
tensor = torch.ones(16 << 20)
print(open("/proc/self/smaps").read())
"""


def demand(block_bytes: int) -> CacheDemand:
    return CacheDemand(block_bytes, block_size=16, max_model_len=1000)


def test_plenty_of_memory_gives_what_the_batch_can_use() -> None:
    assert host_num_blocks(demand(1 << 16), 8, 64 * GIB) == 8 * 63


def test_little_memory_gives_a_quarter_of_it() -> None:
    assert host_num_blocks(demand(1 << 20), 64, GIB) == 256


def test_too_little_memory_is_told_with_sizes_that_fit() -> None:
    with pytest.raises(ConfigError) as raised:
        host_num_blocks(demand(1 << 20), 64, 100 << 20)
    assert str(raised.value) == (
        "HEADRACE_MAX_MODEL_LEN: a sequence of 1000 tokens needs 66 MB of KV cache, but a share of 0.25 of the 105 MB "
        "that are free is 26 MB. Set HEADRACE_KV_CACHE_BYTES=66060288 or HEADRACE_MAX_MODEL_LEN=400"
    )
    assert host_num_blocks(CacheDemand(1 << 20, 16, 400), 64, 100 << 20) == 25


def test_no_memory_at_all_suggests_nothing_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"Free some memory, or serve a smaller model$"):
        host_num_blocks(demand(1 << 20), 64, 1 << 20)


def test_weights_beyond_the_free_memory_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"need 4\.3 GB in float32, but 1\.1 GB of memory are free; set HEADRACE_DTYPE"
    ):
        check_host_weights_fit(4 * GIB, "float32", GIB)
    check_host_weights_fit(GIB, "float32", GIB)


@pytest.mark.skipif(
    not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(), reason="the kernel gives no huge pages"
)
def test_large_tensors_get_huge_pages_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", _MAKE_A_TENSOR], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", done.stdout))) > 32 << 10
