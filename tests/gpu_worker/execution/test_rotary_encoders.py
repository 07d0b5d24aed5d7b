"""Encoders whose tokens turn, through the engine, against `transformers`: vectors, scores, windows, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan, Rows
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.registry import FAMILIES, read_model_config
from tests.gpu_worker.execution.engine_run import make_runner, run
from tests.gpu_worker.execution.fake_memory import FakeMemory
from tests.gpu_worker.execution.pooled_sequences import assert_logits, assert_vectors, sequence_of
from tests.gpu_worker.execution.test_encoders import LENGTHS, prompt_of
from tests.gpu_worker.models.families.random_models import SIZES, randomize_all
from tests.gpu_worker.models.support_page import SAMPLE

# Windows of five tokens to either side, in all but every third layer.
_MODERN = {"local_attention": 10, "num_hidden_layers": 4, "max_position_embeddings": 66}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("ModernBert", _MODERN),
    "modernbert-options": (
        "ModernBert",
        {
            **_MODERN,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "nomic": ("NomicBert", {"type_vocab_size": 2}),
    "jina-v3": ("JinaEmbeddingsV3", {"type_vocab_size": 1, "intermediate_size": 56}),
    "eurobert": ("EuroBert", {}),
    "eurobert-mqa": ("EuroBert", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    # Windows of five tokens to either side.
    "embedding-gemma": (
        "Gemma3Text",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 8,
            "head_dim": 20,
            "query_pre_attn_scalar": 30,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FIRST = ("modernbert", "nomic", "jina-v3", "eurobert", "embedding-gemma")


def saved(directory: Path, name: str, head: str = "Model", **options: Any) -> Any:
    """Save a random model, and return it."""
    import transformers

    family, own = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "pad_token_id": 0, **own, **options})
    torch.manual_seed(len(name))
    model = getattr(transformers, family + head)._from_config(config, attn_implementation="eager").eval()
    randomize_all(model)
    model.save_pretrained(directory)
    return model


def sequences_of(*plans: Rows) -> list[Any]:
    return [
        sequence_of(f"{length}{rows}", prompt_of(length), PoolingPlan(rows, is_whole=True))
        for length in LENGTHS
        for rows in plans
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in CASES])
def test_prompts_side_by_side_give_the_vectors_of_transformers(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    sequences = sequences_of("first", "mean")
    outcome = run(make_runner(tmp_path), sequences, token_budget=130)
    assert outcome.num_prefix_hits == 0
    assert_vectors(model, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_gets_the_same_bits_alone_and_beside_others(tmp_path: Path, name: str, dtype: str) -> None:
    saved(tmp_path, name)
    runner, beside, alone = make_runner(tmp_path, dtype=dtype), sequences_of("mean"), sequences_of("mean")
    run(runner, beside, token_budget=300)
    for sequence in alone:
        run(runner, [sequence], token_budget=64)
    assert [sequence.pooled for sequence in alone] == [sequence.pooled for sequence in beside]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_steps_on_padded_buffers_give_the_same_vectors(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    config = RunnerConfig(tmp_path, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, num_threads=1)
    device, sequences = build_runner(config, memory=FakeMemory(1 << 40)), sequences_of("mean")
    assert sum(layer.block_bytes for layer in device.cache.layers) == 0
    run(device, sequences, token_budget=64, max_num_seqs=16)
    assert_vectors(model, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["cls", "mean"])
def test_a_pair_gets_the_logit_of_transformers(tmp_path: Path, rows: str) -> None:
    model = saved(tmp_path, "modernbert", "ForSequenceClassification", num_labels=1, classifier_pooling=rows)
    plan = PoolingPlan("first" if rows == "cls" else "mean", "classes", is_whole=True)
    sequences = [sequence_of(str(length), prompt_of(length), plan) for length in LENGTHS]
    run(make_runner(tmp_path), sequences, token_budget=64)
    for sequence in sequences:
        assert_logits(model, sequence)


def read(architecture: str, fields: dict[str, Any]) -> ModelConfig:
    return FAMILIES[architecture](JsonFile(Path("config.json"), {**SAMPLE, **fields}))


_PUBLISHED = {
    "n_embd": 256,
    "n_head": 8,
    "n_layer": 8,
    "n_inner": 512,
    "n_positions": 8192,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "causal": False,
}


def test_published_names_of_nomic_mean_what_those_of_transformers_do() -> None:
    published = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
    assert repr(read("NomicBertModel", {**published, **_PUBLISHED})) == repr(
        read("NomicBertModel", {"max_position_embeddings": 8192})
    )


def test_published_names_of_modernbert_mean_what_those_of_transformers_do() -> None:
    published = {"global_attn_every_n_layers": 3, "global_rope_theta": 500.0, "local_rope_theta": 80.0}
    kinds = ["sliding_attention" if layer % 3 else "full_attention" for layer in range(8)]
    thetas = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 80.0}}
    ours = {"layer_types": kinds, "rope_parameters": thetas}
    assert repr(read("ModernBertModel", published)) == repr(read("ModernBertModel", ours))


@pytest.mark.parametrize(
    ("architecture", "fields", "problem"),
    [
        ("NomicBertModel", {**_PUBLISHED, "moe_every_n_layers": 2}, "'moe_every_n_layers' is 2; supported: 0, Nomic"),
        ("NomicBertModel", {**_PUBLISHED, "prenorm": True}, "'prenorm' is true; supported: false"),
        ("NomicBertModel", {**_PUBLISHED, "qkv_proj_bias": None}, "'qkv_proj_bias' is true; supported: false"),
        ("NomicBertModel", {**_PUBLISHED, "activation_function": "gelu"}, "is 'gelu'; supported: 'swiglu'"),
        ("NomicBertModel", {**_PUBLISHED, "rotary_emb_fraction": 0.5}, "'rotary_emb_fraction' is not 1"),
        ("NomicBertModel", {**_PUBLISHED, "rotary_scaling_factor": 2.0}, "'rotary_scaling_factor' is set"),
        ("ModernBertModel", {"classifier_activation": "relu"}, "'classifier_activation' is 'relu'; supported: 'gelu'"),
    ],
)
def test_what_cannot_be_served_is_refused(architecture: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(architecture, fields)


def test_heads_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    fields = {**SAMPLE, "architectures": ["EuroBertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="is 'EuroBertForSequenceClassification'; supported of this family: Euro"):
        read_model_config(tmp_path)
