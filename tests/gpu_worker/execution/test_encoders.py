"""Encoders through the engine, against `transformers`: vectors, scores of pairs, windows, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan, Rows
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, StepResult
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.registry import FAMILIES, read_model_config
from shared.errors import PromptTooLongError
from shared.messages import Lane
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run
from tests.gpu_worker.execution.fake_memory import FakeMemory
from tests.gpu_worker.execution.pooled_sequences import assert_logits, assert_vectors, sequence_of
from tests.gpu_worker.models.families.random_models import SIZES, randomize_all
from tests.gpu_worker.models.support_page import SAMPLE

LENGTHS = (1, 3, 17, 40, 60)
SEPARATOR = 5

# Windows of five tokens to either side, in all but every third layer.
_MODERN = {"local_attention": 10, "num_hidden_layers": 4, "max_position_embeddings": 66}
# The token `SEPARATOR` divides the two segments of BERT's prompts.
_BERT = {"intermediate_size": 80, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_BERT, "type_vocab_size": 2}),
    "roberta": ("Roberta", _BERT),
    "xlm-roberta": ("XLMRoberta", _BERT),
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
BERTS = ("bert", "roberta", "xlm-roberta")
FIRST = (*BERTS, "modernbert", "nomic", "jina-v3", "eurobert", "embedding-gemma")


def some(*fast: str) -> Any:
    """Parametrize a test by all encoders, of which few are not slow."""
    return pytest.mark.parametrize("name", [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in CASES])


def saved(directory: Path, name: str, head: str = "Model", **options: Any) -> Any:
    """Save a random model, and return it."""
    import transformers

    family, own = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "pad_token_id": 0, **own, **options})
    torch.manual_seed(len(name))
    model = getattr(transformers, family + head)._from_config(config, attn_implementation="eager").eval()
    randomize_all(model)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": SEPARATOR, "content": "[SEP]"}]}))
    return model


def prompt_of(length: int) -> list[int]:
    """A text of ordinary tokens that ends with the separator, as tokenizers make it."""
    ordinary = [token for token in random_prompt(2 * length, length) if token > SEPARATOR]
    return [*ordinary[: length - 1], SEPARATOR]


def sequences_of(*plans: Rows, lengths: tuple[int, ...] = LENGTHS, lane: Lane = "interactive") -> list[Sequence]:
    return [
        sequence_of(f"{lane}{length}{rows}", prompt_of(length), PoolingPlan(rows, is_whole=True), lane)
        for length in lengths
        for rows in plans
    ]


@some(*FIRST)
def test_prompts_side_by_side_give_the_vectors_of_transformers(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    runner = make_runner(tmp_path)
    for token_budget in (64, 300):
        sequences = [*sequences_of("first", "mean", "last"), *sequences_of("mean", lane="batch")]
        outcome = run(runner, sequences, token_budget=token_budget)
        assert outcome.num_prefix_hits == 0
        assert_vectors(model, sequences)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@some(*BERTS)
def test_a_prompt_gets_the_same_bits_alone_and_beside_others(tmp_path: Path, name: str, dtype: str) -> None:
    odd = {"hidden_size": 44, "intermediate_size": 53, "hidden_act": "gelu"}
    saved(tmp_path, name, **(odd if name in BERTS else {}))
    runner, beside, alone = (make_runner(tmp_path, dtype=dtype), *(sequences_of("first", "mean") for _ in range(2)))
    run(runner, beside, token_budget=300)
    for sequence in alone:
        run(runner, [sequence], token_budget=64)
    assert [sequence.pooled for sequence in alone] == [sequence.pooled for sequence in beside]


@some("bert")
def test_steps_on_padded_buffers_give_the_same_vectors(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    config = RunnerConfig(tmp_path, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, num_threads=1)
    device, sequences = build_runner(config, memory=FakeMemory(1 << 40)), sequences_of("mean")
    # As many blocks as the batch can use: they take no memory.
    assert device.is_asynchronous
    assert device.num_blocks == 16 * -(-read_model_config(tmp_path).max_model_len // 4)
    assert sum(layer.block_bytes for layer in device.cache.layers) == 0
    run(device, sequences, token_budget=64, max_num_seqs=16)
    assert_vectors(model, sequences)


def test_prompt_that_fits_no_step_is_refused_and_none_is_divided() -> None:
    config = SchedulerConfig(block_size=4, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)
    scheduler, plan = Scheduler(config), PoolingPlan("mean", is_whole=True)
    with pytest.raises(PromptTooLongError, match="at most 32 can fit"):
        scheduler.add(sequence_of("long", prompt_of(33), plan))
    for lane in ("interactive", "batch"):
        for n in (20, 20, 12, 30):
            scheduler.add(sequence_of(f"{lane}{len(scheduler.sequences)}", prompt_of(n), plan, cast("Lane", lane)))
    counts = []
    while scheduler.has_work():
        step = scheduler.schedule(0.0)
        assert step is not None
        assert all(item.num_tokens == item.sequence.num_prompt_tokens for item in step.scheduled)
        counts.append([item.num_tokens for item in step.scheduled])
        scheduler.settle(step, StepResult(step.step, [SampledTokens(pooled=b"") for _ in step.scheduled]))
        scheduler.check_integrity()
    assert sorted(n for count in counts for n in count) == [12, 12, 20, 20, 20, 20, 30, 30]
    assert max(map(sum, counts)) <= 32


@pytest.mark.parametrize("name", BERTS)
def test_pair_gets_the_logit_of_transformers(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, "ForSequenceClassification", num_labels=1)
    pairs = [(prompt_of(first), prompt_of(second)) for first, second in ((2, 3), (10, 30), (30, 1))]
    plan = PoolingPlan("first", "classes", is_whole=True)
    sequences = [sequence_of(str(i), first + second, plan) for i, (first, second) in enumerate(pairs)]
    run(make_runner(tmp_path), sequences, token_budget=64)
    for sequence, (first, second) in zip(sequences, pairs, strict=True):
        segments = [0] * len(first) + [int(name == "bert")] * len(second)
        assert_logits(model, sequence, token_type_ids=torch.tensor([segments]))


@pytest.mark.parametrize("name", BERTS)
def test_a_pair_gets_the_same_bits_alone_and_beside_others(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name, "ForSequenceClassification", num_labels=3, hidden_size=44)
    runner, plan = make_runner(tmp_path), PoolingPlan("first", "classes", is_whole=True)
    beside, alone = ([sequence_of(str(n), prompt_of(n), plan) for n in LENGTHS] for _ in range(2))
    run(runner, beside, token_budget=300)
    for sequence in alone:
        run(runner, [sequence], token_budget=64)
    assert [sequence.pooled for sequence in alone] == [sequence.pooled for sequence in beside]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["cls", "mean"])
def test_a_pair_gets_the_logit_of_the_rows_that_the_model_names(tmp_path: Path, rows: str) -> None:
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
