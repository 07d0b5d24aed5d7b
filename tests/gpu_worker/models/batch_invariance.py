"""What the families' small random models compute for a sequence, alone and among others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_worker.models.decoder import CausalLM
from tests.gpu_worker.models import recurrent_models
from tests.gpu_worker.models.families import composed_cases, dense_cases, latent_cases, mixture_cases
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.paged_run import PagedRun

FAMILIES = {
    **dense_cases.CASES,
    **dense_cases.MORE_CASES,
    **mixture_cases.CASES,
    **mixture_cases.MORE_CASES,
    **composed_cases.CASES,
    **latent_cases.CASES,
    **latent_cases.MORE_CASES,
}
NAMES = (*FAMILIES, *recurrent_models.CASES)
NUMBERS_BESIDE = (1, 2, 6, 15, 32)


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
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
