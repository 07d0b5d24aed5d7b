"""The sampling launches that compile checks look at: vocabularies of Llama 3 and Qwen 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.sampling.config import sampling_config
from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from kernels.sampling.triton_kernel import apply_penalties_triton, count_tokens_triton, sample_tokens_triton


def launch(gpu: Gpu, vocab_size: int, may_truncate: bool, *, is_marked: bool = False) -> torch.Tensor:
    slots = torch.arange(2)
    column, numbers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    parameters = SamplingParameters(column, column, numbers.int(), column, numbers)
    logits = torch.empty(2, vocab_size)
    config, marks = sampling_config(gpu.generation), numbers if is_marked else None
    return sample_tokens_triton(logits, slots, slots, parameters, may_truncate, config, marks)


def penalise(vocab_size: int) -> torch.Tensor:
    table = torch.zeros(2, vocab_size, dtype=torch.int32)
    column, places = torch.ones(2), torch.arange(2)
    penalties = PenaltyTable(column, column, column, table, table[:, : -(-vocab_size // 32)])
    apply_penalties_triton(torch.empty(2, vocab_size), places, penalties, None)
    count_tokens_triton(penalties, places, places)
    return table


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "llama3": partial(launch, gpu, 128_256, True),
        "qwen3": partial(launch, gpu, 151_936, False),
        "watermark": partial(launch, gpu, 151_936, True, is_marked=True),
        "penalties": partial(penalise, 151_936),
    }
