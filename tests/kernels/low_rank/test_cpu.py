from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.build import COMPILE_FLAGS, LIBRARIES, LINK_FLAGS, SOURCE_ROOT, run_compilers
from kernels.cpu_library import _SIGNATURES, _function, cpu_library
from kernels.low_rank import AdapterRows, join
from kernels.low_rank.cpu import CpuAdapterTable
from kernels.low_rank.dispatch import low_rank_reference
from tests.kernels.low_rank.adapters import make_adapter, slots_of

_SLOTS = slots_of(2, -1, 0, 0, 3, -1, 0, 2, 0, 0, 1, 0)


# Flags that take instructions from the compiler: it makes code for an older processor, which runs on this one too.
_OLDER = {"without AVX512-BF16": "-mno-avx512bf16", "AVX2": "-mno-avx512f", "SSE2": "-march=x86-64"}


@pytest.fixture(
    scope="module", params=["this processor", *(pytest.param(name, marks=pytest.mark.slow) for name in _OLDER)]
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if (own := cpu_library()) is None:
        pytest.skip("there is no compiler")
    if request.param not in _OLDER:
        return own
    if platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86-64")
    return _compiled(tmp_path_factory.mktemp("low_rank"), _OLDER[request.param])


def _compiled(directory: Path, flag: str) -> Any:
    """Compile the kernel alone."""
    source, library = directory / "low_rank.cpp", directory / "low_rank.so"
    width = "EXPORTED int32_t headrace_panel_width() { return headrace::kPanel; }"
    source.write_text(f'#include "{SOURCE_ROOT}/low_rank/cpu.cpp"\n{width}\n')
    run_compilers(
        [["g++", *COMPILE_FLAGS, flag, *LINK_FLAGS, str(source), "-o", str(library), *LIBRARIES]], lambda _: None
    )
    loaded = ctypes.CDLL(str(library))
    names = ("low_rank", "panel_width")
    return SimpleNamespace(**{name: _function(loaded, name, *_SIGNATURES[name]) for name in names})


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "num_inputs"), [([70, 9, 30], 37), ([64, 64], 128), ([1], 3)], ids=str)
def test_sums_equal_reference(
    library: Any, rows: list[int], num_inputs: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    table, generator = CpuAdapterTable(library, 4, dtype), torch.Generator().manual_seed(num_inputs)
    # The slot of one row leaves the matrix as it is.
    adapters = [
        make_adapter([5, 0, 17][: len(rows)], rows, num_inputs, generator, stored),
        None,
        make_adapter([1, 256, 3][: len(rows)], rows, num_inputs, generator, stored),
        make_adapter([4] * len(rows), rows, num_inputs, generator, stored),
    ]
    packed = [None if adapter is None else table.pack(adapter) for adapter in adapters]
    join(packed)
    for slot, part in enumerate(packed):
        table.place(slot, part)
    # Rows lie apart, and the gaps must stay unchanged.
    memory = torch.randn(len(_SLOTS), sum(rows) + 5, generator=generator).to(dtype)
    x = torch.randn(len(_SLOTS), num_inputs + 2, generator=generator).to(dtype)[:, :num_inputs]
    expected = memory.clone()
    low_rank_reference(x, expected[:, : sum(rows)], _SLOTS.tolist(), adapters)
    table.add(x, memory[:, : sum(rows)], AdapterRows(_SLOTS, 260))
    # In bfloat16 the products between the matrices are rounded too, of 256 ranks here.
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(memory, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(memory[:, sum(rows) :], expected[:, sum(rows) :])
    assert torch.equal(memory[_SLOTS < 0], expected[_SLOTS < 0])


def test_bits_of_a_row_do_not_depend_on_others(library: Any) -> None:
    table, generator = CpuAdapterTable(library, 4, torch.float32), torch.Generator().manual_seed(0)
    for slot in range(4):
        table.place(slot, table.pack(make_adapter([3 + slot, 9], [40, 50], 45, generator)))
    x, before = torch.randn(len(_SLOTS), 45, generator=generator), torch.randn(len(_SLOTS), 90, generator=generator)
    together = before.clone()
    table.add(x, together, AdapterRows(_SLOTS, 16))
    for row, slot in enumerate(_SLOTS):
        alone = before[row : row + 1].clone()
        table.add(x[row : row + 1], alone, AdapterRows(slots_of(slot), 16))
        assert torch.equal(alone, together[row : row + 1])


def test_cleared_slot_adds_nothing(library: Any) -> None:
    table = CpuAdapterTable(library, 4, torch.float32)
    table.place(0, table.pack(make_adapter([4], [8], 8, torch.Generator().manual_seed(1))))
    table.place(0, None)
    result = torch.ones(1, 8)
    table.add(torch.ones(1, 8), result, AdapterRows(slots_of(0), 4))
    assert torch.equal(result, torch.ones(1, 8))
