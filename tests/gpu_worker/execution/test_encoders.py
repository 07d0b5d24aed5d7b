"""Encoders through the engine, against `transformers`: whole prompts side by side, vectors and scores of pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, StepResult
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import PromptTooLongError
from shared.messages import Lane
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run
from tests.gpu_worker.execution.fake_memory import FakeMemory
from tests.gpu_worker.execution.pooled_sequences import assert_logits, assert_vectors, sequence_of

FAMILIES = ("Bert", "Roberta", "XLMRoberta")
LENGTHS = (1, 3, 17, 40, 60)
SEPARATOR = 5
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}


def saved(directory: Path, family: str, head: str, **options: Any) -> Any:
    """Save a random model and return it; BERT has two segments, divided by the token `SEPARATOR`."""
    import transformers

    torch.manual_seed(3)
    segments = 2 if family == "Bert" else 1
    config = getattr(transformers, f"{family}Config")(**SIZES | options | {"type_vocab_size": segments})
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1) * 0.5)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": SEPARATOR, "content": "[SEP]"}]}))
    return model


def prompt_of(length: int) -> list[int]:
    """A text of ordinary tokens that ends with the separator, as tokenizers make it."""
    ordinary = [token for token in random_prompt(2 * length, length) if token > SEPARATOR]
    return [*ordinary[: length - 1], SEPARATOR]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("token_budget", [64, 300])
def test_prompts_side_by_side_give_the_vectors_of_transformers(tmp_path: Path, family: str, token_budget: int) -> None:
    model = saved(tmp_path, family, "Model")
    plans = [PoolingPlan(rows, is_whole=True) for rows in ("first", "mean", "last")]
    sequences = [sequence_of(f"{n}{plan.rows}", prompt_of(n), plan) for n in LENGTHS for plan in plans]
    sequences += [sequence_of(f"batch{n}", prompt_of(n), plans[1], "batch") for n in LENGTHS]
    outcome = run(make_runner(tmp_path), sequences, token_budget=token_budget)
    assert outcome.num_prefix_hits == 0
    assert_vectors(model, sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_pair_gets_the_logit_of_transformers(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family, "ForSequenceClassification", num_labels=1)
    pairs = [(prompt_of(first), prompt_of(second)) for first, second in ((2, 3), (10, 30), (30, 1))]
    plan = PoolingPlan("first", "classes", is_whole=True)
    sequences = [sequence_of(str(i), first + second, plan) for i, (first, second) in enumerate(pairs)]
    run(make_runner(tmp_path), sequences, token_budget=64)
    for sequence, (first, second) in zip(sequences, pairs, strict=True):
        segments = [0] * len(first) + [int(family == "Bert")] * len(second)
        assert_logits(model, sequence, token_type_ids=torch.tensor([segments]))


def test_prompt_that_fits_no_step_is_refused_and_none_is_divided(tmp_path: Path) -> None:
    saved(tmp_path, "Bert", "Model")
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


def test_steps_on_padded_buffers_give_the_same_vectors(tmp_path: Path) -> None:
    model = saved(tmp_path, "Bert", "Model")
    config = RunnerConfig(tmp_path, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, num_threads=1)
    device = build_runner(config, memory=FakeMemory(1 << 40))
    # As many blocks as the batch can use: they take no memory.
    assert (device.is_asynchronous, device.num_blocks) == (True, 16 * 17)
    assert sum(layer.block_bytes for layer in device.cache.layers) == 0
    sequences = [sequence_of(str(n), prompt_of(n), PoolingPlan("mean", is_whole=True)) for n in LENGTHS]
    run(device, sequences, token_budget=64, max_num_seqs=16)
    assert_vectors(model, sequences)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_gets_the_same_bits_alone_and_beside_others(tmp_path: Path, family: str, dtype: str) -> None:
    saved(tmp_path, family, "Model", hidden_size=44, intermediate_size=53, hidden_act="gelu")
    runner, plans = make_runner(tmp_path, dtype=dtype), [PoolingPlan(rows, is_whole=True) for rows in ("first", "mean")]

    def sequences(lengths: tuple[int, ...]) -> list[Sequence]:
        return [sequence_of(f"{n}{plan.rows}", prompt_of(n), plan) for n in lengths for plan in plans]

    beside = sequences(LENGTHS)
    run(runner, beside, token_budget=300)
    for length in LENGTHS:
        alone = sequences((length,))
        for sequence in alone:
            run(runner, [sequence], token_budget=64)
        expected = [sequence.pooled for sequence in beside if sequence.num_prompt_tokens == length]
        assert [sequence.pooled for sequence in alone] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_gets_the_same_bits_alone_and_beside_others(tmp_path: Path, family: str) -> None:
    saved(tmp_path, family, "ForSequenceClassification", num_labels=3, hidden_size=44)
    runner, plan = make_runner(tmp_path), PoolingPlan("first", "classes", is_whole=True)
    beside, alone = ([sequence_of(str(n), prompt_of(n), plan) for n in LENGTHS] for _ in range(2))
    run(runner, beside, token_budget=300)
    for sequence in alone:
        run(runner, [sequence], token_budget=64)
    assert [sequence.pooled for sequence in alone] == [sequence.pooled for sequence in beside]
