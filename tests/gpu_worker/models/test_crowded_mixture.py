"""Mixtures of experts in a process whose threads share one core: some of them are always far behind the others.

The process is `python -m tests.gpu_worker.models.test_crowded_mixture DIRECTORY`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.test_batch_invariance import logits_among, threads

ROOT = Path(__file__).parents[3]
NUM_THREADS = 2
NUM_ROUNDS = 600
_CONFIG = MixtralConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=32,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)


def main(directory: Path) -> None:
    """Compute the same again and again, and compare it with what one thread computes."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.manual_seed(0)
    MixtralForCausalLM(_CONFIG).save_pretrained(directory)
    model = load_model(directory, torch.float32, CPU)
    with threads(1):
        expected = logits_among(model, 2)
    with threads(NUM_THREADS):
        for _ in range(NUM_ROUNDS):
            assert torch.equal(logits_among(model, 2), expected)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores")
def test_thread_that_comes_to_a_layer_when_others_have_left_it_does_nothing_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_worker.models.test_crowded_mixture", str(tmp_path)]
    # A thread that counts the items of a layer behind waits for ever.
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
