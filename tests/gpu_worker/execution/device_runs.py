"""Makes device runners on whatever device, with caches whose unwritten slots are NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.execution.memory.kv_cache import KVCache, allocate_kv_cache
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from tests.gpu_worker.execution.engine_run import BLOCK

# The same code runs on both. On a bare machine with a GPU:
# python3 -m pytest -c /dev/null --rootdir=. --confcutdir=tests/gpu_worker/execution --import-mode=importlib -m gpu \
#     tests/gpu_worker/execution
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKEN_BUDGET = 64


def load(directory: Path, device: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(directory, dtype, torch.device(device))


def poisoned_cache(model: CausalLM, num_blocks: int, dtype: torch.dtype) -> KVCache:
    cache = allocate_kv_cache(num_blocks, BLOCK, model.config, dtype, model.device)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    return cache


def make_device_runner(
    model: CausalLM,
    *,
    is_graphed: bool,
    depth: int = 2,
    num_blocks: int = 400,
    max_num_seqs: int = 40,
    max_model_len: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    kv_cache_dtype: torch.dtype | None = None,
    **settings: Any,
) -> TorchModelRunner:
    cache = poisoned_cache(model, num_blocks, kv_cache_dtype or model.dtype)
    length = max_model_len or model.config.max_model_len
    runner = TorchModelRunner(model, cache, max_num_seqs, length, token_budget, **{"is_asynchronous": True, **settings})
    runner.max_steps_in_flight = min(depth, runner.max_steps_in_flight)
    if is_graphed:
        runner.capture_graphs()
    return runner


def transformers_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits after each of the tokens, on the CPU."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device)).logits[0]
    return logits.float().cpu()
