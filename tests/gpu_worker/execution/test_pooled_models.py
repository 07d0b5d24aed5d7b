"""Layouts of models that make vectors and scores, against `transformers`: layers alone, and heads of one class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.registry import read_model_config
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LENGTHS = (1, 9, 120)
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def saved(directory: Path, family: str, head: str, **options: Any) -> Any:
    """Save a random model and return it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    model.save_pretrained(directory)
    return model


def answers(directory: Path, plan: PoolingPlan) -> list[Any]:
    """Return what the engine computes for prompts of all lengths, in chunks of 50 tokens."""
    sequences = []
    for length in LENGTHS:
        prompt = random_prompt(length, length)
        sequences.append(Sequence(str(length), prompt, length, Sampling(max_tokens=0), max_tokens=0, pooling=plan))
    run(make_runner(directory), sequences, token_budget=50)
    return [sum(np.frombuffer(part, dtype=np.float64) for part in sequence.pooled) for sequence in sequences]


def hidden_of(decoder: Any, length: int) -> Any:
    with torch.no_grad():
        return decoder(torch.tensor([random_prompt(length, length)])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["last", "mean"])
def test_layers_alone_give_the_vectors_of_transformers(tmp_path: Path, family: str, rows: Any) -> None:
    model = saved(tmp_path, family, "Model")
    for length, vector in zip(LENGTHS, answers(tmp_path, PoolingPlan(rows)), strict=True):
        hidden = hidden_of(model, length)
        expected = hidden[-1] if rows == "last" else hidden.mean(0)
        count = length if rows == "mean" else 1
        np.testing.assert_allclose(vector / count, expected, atol=1e-4, rtol=0)


def test_whole_model_whose_tensors_have_bare_names_is_read(tmp_path: Path) -> None:
    # As embedding models are published whose configuration is that of the model they were made of.

    model = saved(tmp_path, "Qwen3", "Model", tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    for length, vector in zip(LENGTHS, answers(tmp_path, PoolingPlan("last")), strict=True):
        np.testing.assert_allclose(vector, hidden_of(model, length)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_one_class_gives_the_logit_of_transformers(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family, "ForSequenceClassification", num_labels=1)
    for length, logit in zip(LENGTHS, answers(tmp_path, PoolingPlan("last", "classes")), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([random_prompt(length, length)])).logits[0].numpy()
        np.testing.assert_allclose(logit, expected, atol=1e-4, rtol=0)


def test_architecture_of_no_family_is_told_where_those_stand_that_are_served(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", "ForTokenClassification")
    with pytest.raises(CheckpointError, match=r"'LlamaForTokenClassification'.*ops/docs/models.md"):
        read_model_config(tmp_path)
