"""The compiled CPU kernels as callable C functions, or None where they cannot be had.

The library is loaded at the first use and kept for the life of the process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.build import KernelBuildError, build_library, cache_dir, kernels_allowed

logger = logging.getLogger(__name__)

# The numbers of `DType` in simd.h.
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The C functions. Their arguments are those of the `extern "C"` functions of the same names."""

    paged_attention: Callable[..., None]
    kv_write: Callable[..., None]


@functools.cache
def cpu_library() -> CpuLibrary | None:
    """Return the compiled kernels, building them at the first call; None means: use plain torch."""
    if not kernels_allowed(os.environ):
        logger.info("CPU kernels are off (HEADRACE_CPU_KERNELS); attention runs in plain torch, several times slower")
        return None
    try:
        return load_library(build_library(cache_dir(os.environ)))
    except (KernelBuildError, OSError) as error:
        logger.warning("no CPU kernels (%s); attention runs in plain torch, several times slower: install g++", error)
        return None


def load_library(path: Path) -> CpuLibrary:
    """Load a compiled library.

    Raises:
        OSError: It does not fit this process, for example because torch brought no OpenMP runtime.
    """
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    attention = library.headrace_paged_attention
    attention.argtypes = [_POINTER] * 7 + [_INT64] + [_INT32] * 7 + [_FLOAT] + [_INT32] * 3
    attention.restype = None
    kv_write = library.headrace_kv_write
    kv_write.argtypes = [_POINTER] * 5 + [_INT64] * 2 + [_INT32] * 4
    kv_write.restype = None
    return CpuLibrary(attention, kv_write)
