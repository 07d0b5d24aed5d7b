"""A checkpoint of every family that GGUF files are read of, for llama.cpp's own converter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.gpu_worker.quantization.gguf.converted import Converted
from tests.gpu_worker.quantization.gguf.converted_dense import DENSE
from tests.gpu_worker.quantization.gguf.converted_hybrids import HYBRIDS
from tests.gpu_worker.quantization.gguf.converted_mixtures import MIXTURES

CASES: Mapping[str, Converted] = MappingProxyType({**DENSE, **MIXTURES, **HYBRIDS})
