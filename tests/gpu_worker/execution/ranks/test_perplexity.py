"""Ranks in bfloat16 take a text for as likely as one process does: a tenth of a percent of the perplexity."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.demo_model.corpus import held_out_documents
from ops.stack.config import DEMO_MODEL
from shared.sampling import Sampling
from tests.gpu_worker.execution.ranks.group_run import started

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 600,
    "block_size": 16,
    "num_blocks": 120,
    "max_draft_tokens": 0,
}


def prompts() -> list[list[int]]:
    tokenizer = ModelTokenizer(read_model_directory(DEMO_MODEL))
    token_ids = tokenizer.encode_text("".join(held_out_documents()))
    return [token_ids[first : first + 500] for first in range(0, 4000, 500)]


def perplexity(size: int, **settings: Any) -> float:
    logprobs: list[float] = []
    with started(DEMO_MODEL, size, **SETTINGS, **settings) as (run, _):
        sampling = Sampling(temperature=0.0, prompt_logprobs=0)
        sequences = [
            Sequence(str(number), prompt, len(prompt), sampling, max_tokens=1, arrival=number)
            for number, prompt in enumerate(prompts())
        ]
        for entries in run.answer(sequences).prompt_logprobs.values():
            logprobs += [entry.logprob for entry in entries]
    assert len(logprobs) > 3500
    return math.exp(-math.fsum(logprobs) / len(logprobs))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_perplexity_is_that_of_one_process(size: int, num_stages: int) -> None:
    assert perplexity(size, pipeline_parallel_size=num_stages) == pytest.approx(perplexity(1), rel=1e-3)
