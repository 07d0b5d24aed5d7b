"""A sequence's numbers are the same to the bit whatever is computed beside it, in every kind of layer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from tests.gpu_worker.models import recurrent_models
from tests.gpu_worker.models.families import composed_cases, dense_cases, latent_cases, mixture_cases
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU

FAMILIES = {
    **dense_cases.CASES, **dense_cases.MORE_CASES, **mixture_cases.CASES, **mixture_cases.MORE_CASES,
    **composed_cases.CASES, **latent_cases.CASES, **latent_cases.MORE_CASES,
}  # fmt: skip
NAMES = (*FAMILIES, *recurrent_models.CASES)
NUMBERS_BESIDE = (1, 2, 6, 15, 32)
# Latent attention, a block without gates, per-layer inputs, and the gate of a shared expert beside gated delta nets.
ONCE_DIFFERENT = ("deepseek-v3", "phi", "gemma4-e", "qwen3_next")


def save_named(name: str, directory: Path) -> None:
    """Save the random model of this name."""
    if name in recurrent_models.CASES:
        recurrent_models.save_case(name, directory)
    else:
        save_case(FAMILIES[name], directory)


def logits_among(model: CausalLM, num_beside: int, chunks: tuple[int, ...] = (13, 1, 1, 2, 1)) -> torch.Tensor:
    """Return the logits of one sequence that is computed in these chunks, beside others of other tokens."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, 97, (sum(chunks),), generator=generator) for _ in range(num_beside + 1)]
    run = PagedRun(model, sequences)
    return torch.cat([run.step(dict.fromkeys(range(num_beside + 1), count))[0] for count in chunks])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ONCE_DIFFERENT)
def test_a_row_is_the_same_alone_and_among_others(tmp_path: Path, name: str) -> None:
    save_named(name, tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    alone = logits_among(model, 0, (7, 1))
    for num_beside in (2, 6):
        assert torch.equal(logits_among(model, num_beside, (7, 1)), alone), num_beside


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_the_same_alone_and_among_others(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    save_named(name, tmp_path)
    model = load_model(tmp_path, dtype, CPU)
    alone = logits_among(model, 0)
    for num_beside in NUMBERS_BESIDE:
        assert torch.equal(logits_among(model, num_beside), alone), num_beside
    with threads(2):
        assert torch.equal(logits_among(model, NUMBERS_BESIDE[-1]), alone)


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
    command = [sys.executable, "-m", "tests.gpu_worker.models.test_batch_invariance", str(tmp_path)]
    # A thread that counts the items of a layer behind waits for ever.
    subprocess.run(command, cwd=ROOT, check=True, timeout=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
