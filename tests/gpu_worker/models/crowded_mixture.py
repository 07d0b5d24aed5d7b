"""A process whose threads share one core computes mixtures: some threads are always far behind the others.

`python -m tests.gpu_worker.models.crowded_mixture DIRECTORY`. Its layers choose different numbers of experts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.batch_invariance import logits_among, threads
from tests.gpu_worker.models.pairs import CPU

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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
