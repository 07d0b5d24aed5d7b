"""Greedy answers of the whole engine on quantized checkpoints, against the oracle's on the dense weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, run
from tests.gpu_worker.quantization.checkpoints import Pack, but_head, make_checkpoint
from tests.gpu_worker.quantization.packers import awq, ct_packed, fp8_blocks, gptq, in_order, shuffled
from tests.gpu_worker.quantization.test_compressed_tensors import INT4, config, group

PROMPTS = [[5, 9, 33, 2, 71], list(range(20, 60)), [8]]
NUM_TOKENS = 16

CHECKPOINTS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq with act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        lambda _, w: gptq(w, 4, shuffled(w.shape[1], 32, 1), symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, but_head(lambda w: awq(w, 16))),
    "compressed-tensors": (
        config("pack-quantized", INT4),
        but_head(lambda w: ct_packed(w, 4, in_order(w.shape[1], 32), symmetric=True)),
    ),
    "fp8 blocks": (
        config(
            "float-quantized",
            group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
        ),
        but_head(lambda w: fp8_blocks(w, name="weight_scale")),
    ),
}


def oracle_tokens(oracle: Any, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def assert_answers_equal(directory: Path, oracle: Any, **settings: Any) -> None:
    """Let the engine answer the prompts, which arrive one a step."""
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sequences = [make_sequence(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    runner = make_runner(directory, max_model_len=100, **settings)
    outcome = run(runner, sequences, token_budget=16, arrivals_per_step=1)
    assert outcome.tokens == {str(i): oracle_tokens(oracle, prompt) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_answers_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    fields, pack = CHECKPOINTS[name]
    made = make_checkpoint(tmp_path, fields, pack, eos_token_id=None)
    assert_answers_equal(tmp_path, made.oracle)
