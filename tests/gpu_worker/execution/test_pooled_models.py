"""Layouts of models that make vectors and scores, against `transformers`: layers alone, and heads of one class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.registry import read_model_config
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run
from tests.gpu_worker.execution.pooled_sequences import assert_logits, assert_vectors, sequence_of

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


def pooled(directory: Path, plan: PoolingPlan) -> list[Sequence]:
    """Let the engine compute prompts of all lengths, in chunks of 50 tokens."""
    sequences = [sequence_of(str(length), random_prompt(length, length), plan) for length in LENGTHS]
    run(make_runner(directory), sequences, token_budget=50)
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["last", "mean"])
def test_layers_alone_give_the_vectors_of_transformers(tmp_path: Path, family: str, rows: Any) -> None:
    model = saved(tmp_path, family, "Model")
    assert_vectors(model, pooled(tmp_path, PoolingPlan(rows)))


def test_whole_model_whose_tensors_have_bare_names_is_read(tmp_path: Path) -> None:
    # As embedding models are published whose configuration is that of the model they were made of.
    model = saved(tmp_path, "Qwen3", "Model", tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert_vectors(model, pooled(tmp_path, PoolingPlan("last")))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_one_class_gives_the_logit_of_transformers(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family, "ForSequenceClassification", num_labels=1)
    for sequence in pooled(tmp_path, PoolingPlan("last", "classes")):
        assert_logits(model, sequence)


def test_architecture_of_no_family_is_told_where_those_stand_that_are_served(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", "ForTokenClassification")
    with pytest.raises(CheckpointError, match=r"'LlamaForTokenClassification'.*ops/docs/models.md"):
        read_model_config(tmp_path)
