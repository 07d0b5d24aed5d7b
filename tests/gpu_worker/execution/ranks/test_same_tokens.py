"""Ten thousand tokens of two ranks are those of one process, over forms of weights, mixers and what requests ask for.

Each model answers greedy and drawn requests with log probabilities, grammars, penalties and truncation, in mixed
batches: with room, with preemptions, and with drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.speculative.ngram.proposer import NgramProposer
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_divided_models import FORMS
from tests.gpu_worker.execution.ranks.test_group import assert_same, sequences
from tests.gpu_worker.models.families import latent_cases
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.quantization.checkpoints import make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.test_mxfp4 import CASE as GPT_OSS
from tests.gpu_worker.quantization.test_mxfp4 import save_packed

VOCAB = 100
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": None}


def _form(name: str) -> Callable[[Path], object]:
    settings, pack, options = FORMS[name]
    return lambda path: make_checkpoint(path, settings, pack, **{**SIZES, **options})


LATENT = next(iter(latent_cases.CASES.values()))
MODELS: dict[str, Callable[[Path], object]] = {
    "llama": lambda path: save_case(Case("Llama", SIZES), path),
    "one-kv-head": lambda path: save_case(Case("Llama", {**SIZES, "num_key_value_heads": 1}), path),
    "windows": lambda path: save_case(Case("Mistral", {**SIZES, "sliding_window": 10}), path),
    "latent": lambda path: save_case(Case(LATENT.family, {**LATENT.options, **SIZES}), path),
    "gpt-oss-mxfp4": lambda path: save_packed(
        path, Case("GptOss", {**GPT_OSS.options, **SIZES, "num_local_experts": 4})
    ),
    "gguf": lambda path: write_model(path / "model.gguf", "llama-mixed", **{**SIZES, "eos_token_id": 1}),
    **{name: _form(name) for name in ("gptq", "gptq-act-order", "awq", "int8")},
    **{
        name: lambda path, name=name: save_recurrent(name, path, eos_token_id=None)
        for name in ("qwen3_5_moe", "lfm2", "mamba2", "bamba")
    },
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 32}, {"proposer": True})


def ways() -> list[dict[str, Any]]:
    return [{**way, "proposer": NgramProposer(100_000)} if "proposer" in way else way for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    with started(tmp_path, 1, dtype="float32", max_model_len=256) as (alone, _):
        expected = [alone.answer(sequences(18), **way) for way in ways()]
    with started(tmp_path, 2, dtype="float32", max_model_len=256) as (run, _):
        for way, outcome in zip(ways(), expected, strict=True):
            assert_same(run.answer(sequences(18), **way), outcome)
    assert expected[1].num_preemptions > 0
    # Of all models together ten thousand.
    num_tokens = sum(len(tokens) for outcome in expected for tokens in outcome.tokens.values())
    assert num_tokens > 10_000 / len(MODELS)
