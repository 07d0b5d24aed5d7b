"""Mixtures of experts in engines of every kind: nothing else in a step may change which experts a token gets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.execution.engine_run import MAX_LEN, VOCAB
from tests.gpu_worker.matrix.factors import ENGINE_FACTORS, EngineCell
from tests.gpu_worker.matrix.parts import save_models
from tests.gpu_worker.matrix.test_failing_steps import check_failing_steps
from tests.gpu_worker.matrix.test_speculation_matrix import BYSTANDERS, SELECTION, check_cell
from tests.gpu_worker.matrix.traffic import Oracle, choices_of

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save_tiny_mixture(directory: Path) -> Any:
    """Save a random Qwen2-MoE, a shared expert included, whose next tokens depend on the whole context."""
    import transformers

    torch.manual_seed(5)
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
    )
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.dim() == 1))
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(save_models(tmp_path_factory.mktemp("models"), save_tiny_mixture))


@pytest.mark.parametrize("proposer", ENGINE_FACTORS["proposer"])
def test_drafts_eight_bit_caches_and_resumptions_change_no_answer(oracle: Oracle, proposer: str) -> None:
    num_drafted = 0
    for place, (cell, asks) in enumerate(SELECTION):
        if cell.proposer == proposer:
            traffic = check_cell(oracle, cell, [*choices_of(asks), *random.Random(place).sample(BYSTANDERS, 5)])
            assert traffic.parts.scheduler.speculation is not None
            num_drafted += traffic.parts.scheduler.speculation.num_draft_tokens
    assert num_drafted > 20


@pytest.mark.parametrize("runner", ENGINE_FACTORS["runner"])
@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_failing_steps_change_no_answer(oracle: Oracle, proposer: str, runner: str) -> None:
    check_failing_steps(oracle, EngineCell(proposer, runner, "auto", "ample", "small", "fixed"))
