from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mamba2Config

from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.weights_size import weights_bytes
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer, check_speculation
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.train_draft.job import KINDS, TrainingDivergedError, check_job, train_draft, train_on
from ops.train_draft.material import prepare
from ops.train_draft.optimization import Length
from ops.train_draft.sizes import DraftShape
from ops.train_draft.target import HiddenVectors
from shared.errors import ConfigError
from tests.ops.train_draft.conftest import ChangedTarget, JobMaker, break_embedding, ignore

SETTINGS = {"model": "draft", "medusa": "medusa", "eagle": "eagle"}


@pytest.mark.parametrize("kind", ["model", "medusa", pytest.param("eagle", marks=pytest.mark.slow)])
def test_training_lowers_the_loss(job: JobMaker, kind: str) -> None:
    training = train_draft(job(kind, steps=40), ignore)

    assert training.steps == 40
    assert training.last_loss < 0.95 * training.first_loss
    shares = training.acceptance.by_position
    assert training.acceptance.num_drafts > 0
    assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_trains_the_same_weights_and_another_one_others(job: JobMaker, kind: str) -> None:
    jobs = [job(kind, "a"), job(kind, "b"), job(kind, "c", seed=1)]
    for one in jobs:
        train_draft(one, ignore)

    first, same, other = (load_file(one.out / "model.safetensors") for one in jobs)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_worker_loads_what_was_trained_for_a_target_of_another_family(
    job: JobMaker, tied_target: Path, kind: str
) -> None:
    one = job(kind, model=tied_target)
    train_draft(one, ignore)

    config = WorkerConfig(model=tied_target, speculative=SETTINGS[kind], draft_model=one.out)
    check_speculation(config, ModelTokenizer(read_model_directory(tied_target)))
    runner_config = RunnerConfig(tied_target, num_blocks=8, max_num_seqs=2, max_model_len=32, num_threads=1)
    runner = build_runner(runner_config)
    build_proposer(config, runner_config, runner)


def test_small_model_is_computed_alike_by_transformers_and_by_the_engine(job: JobMaker, target: Path) -> None:
    one = job("model", hidden_size=32, num_layers=2)
    train_draft(one, ignore)

    token_ids = torch.arange(5, 25)
    oracle = AutoModelForCausalLM.from_pretrained(one.out, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(token_ids[None]).logits[0]
    ours = _logits(one.out, token_ids)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    tokenizers = [ModelTokenizer(read_model_directory(folder)) for folder in (one.out, target)]
    assert tokenizers[0].has_vocabulary_of(tokenizers[1])


def _logits(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    vectors = HiddenVectors(folder, torch.float32, len(token_ids))
    model = load_model(folder, torch.float32, torch.device("cpu"))
    assert read_model_config(folder).num_layers == 2
    with torch.inference_mode():
        return model.logits(vectors.of(token_ids))


def test_medusa_heads_have_matrices_of_their_own_unless_they_share_the_targets(job: JobMaker) -> None:
    own, shared = job("medusa", "own", head_layers=2), job("medusa", "shared", shares_head=True)
    for one in (own, shared):
        train_draft(one, ignore)

    blocks = {f"{head}.{layer}.linear.{part}" for head in range(3) for layer in range(2) for part in ("weight", "bias")}
    assert set(load_file(own.out / "model.safetensors")) == blocks | {f"{head}.2.weight" for head in range(3)}
    assert set(load_file(shared.out / "model.safetensors")) == {name for name in blocks if ".0." in name}
    config = json.loads((own.out / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)


@pytest.mark.parametrize(
    ("change", "variable", "problem"),
    [
        ({"kind": "magic"}, "HEADRACE_KIND", "'magic' is not one of model, medusa, eagle"),
        ({"length": Length(None, None)}, "HEADRACE_MINUTES", "is needed, or HEADRACE_STEPS"),
        ({"length": Length(None, 0.0)}, "HEADRACE_MINUTES", "must be more than 0"),
        ({"kind": "medusa", "shape": DraftShape(num_heads=32)}, "HEADRACE_MEDUSA_NUM_HEADS", "take less than 32 heads"),
    ],
)
def test_jobs_that_cannot_work_are_refused(
    job: JobMaker, change: dict[str, object], variable: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_job(replace(job("eagle"), **change))  # type: ignore[arg-type]

    assert raised.value.variable == variable
    assert problem in raised.value.problem


def test_quantized_target_is_refused_before_it_writes_anything(job: JobMaker, changed: ChangedTarget) -> None:
    model = changed("quantized", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})

    with pytest.raises(ConfigError, match=r"is quantized \(gptq\); train for the model that it was made from"):
        check_job(job("medusa", model=model))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}),
        ("ApertusForCausalLM", {"hidden_act": "xielu"}),
    ],
)
def test_eagle_layer_has_a_function_and_a_length_of_its_own(
    job: JobMaker, changed: ChangedTarget, architecture: str, fields: dict[str, object]
) -> None:
    model = changed("other", architectures=[architecture], **fields)
    if "n_positions" in fields:
        config = json.loads((model / "config.json").read_text())
        del config["max_position_embeddings"], config["rope_parameters"]
        (model / "config.json").write_text(json.dumps(config))
    check_job(job("eagle", model=model))


def test_eagle_layer_of_a_target_that_does_not_attend_is_refused(job: JobMaker, changed: ChangedTarget) -> None:
    model = changed("mamba2")
    sizes = json.loads((model / "config.json").read_text())
    options = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "num_hidden_layers": 2}
    config = Mamba2Config(hidden_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"], **options)
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(model)

    problem = r"^HEADRACE_TARGET: .*mamba2 does not attend, and an EAGLE layer has .*; train another HEADRACE_KIND$"
    with pytest.raises(ConfigError, match=problem):
        check_job(job("eagle", model=model))
    check_job(job("medusa", model=model))


def test_target_without_a_tokenizer_is_refused_by_the_name_of_its_setting(
    job: JobMaker, changed: ChangedTarget
) -> None:
    model = changed("mute")
    (model / "tokenizer.json").unlink()

    with pytest.raises(ConfigError, match=r"^HEADRACE_TARGET: .*mute has no tokenizer.json"):
        check_job(job("medusa", model=model))


def test_tokenizer_of_a_larger_vocabulary_is_refused(job: JobMaker, changed: ChangedTarget) -> None:
    with pytest.raises(ConfigError, match="has a tokenizer with more than the model's 8 tokens; take its own"):
        train_draft(job("medusa", model=changed("cut", vocab_size=8)), ignore)


def test_hidden_vectors_that_do_not_fit_beside_the_target_are_refused(
    job: JobMaker, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(target)
    weights = weights_bytes(target, config.dtype, torch.device("cpu"), is_tied=config.tie_word_embeddings)
    monkeypatch.setattr("ops.train_draft.material.free_host_bytes", lambda: weights + 150_000)

    # 16 rows to learn from and 32 to measure on, of 32 tokens with 64 numbers of two bytes.
    problem = "need 197 KB beside the target's 452 KB, but 602 KB of memory are free; set 147 at most"
    with pytest.raises(ConfigError, match=f"^HEADRACE_TOKENS: hidden vectors {problem}"):
        train_draft(job("medusa"), ignore)


def test_target_that_does_not_fit_the_memory_is_refused_by_the_name_of_its_setting(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.train_draft.material.free_host_bytes", lambda: 150_000)

    with pytest.raises(ConfigError, match=r"^HEADRACE_TARGET: the weights of .* need 452 KB, but 150 KB of memory"):
        train_draft(job("medusa"), ignore)


def test_draft_of_weights_that_are_no_numbers_is_not_written(job: JobMaker) -> None:
    one = job("medusa")
    material = prepare(one.material, ignore)

    def broken(*_: object) -> Iterator[object]:
        while True:
            batch = material.training.batch(torch.arange(4))
            yield replace(batch, hidden=batch.hidden * float("inf"))

    damaged = replace(material, training=SimpleNamespace(batches=broken))  # type: ignore[arg-type]
    told: list[str] = []
    with pytest.raises(TrainingDivergedError, match=r"diverged \(loss nan\); no draft was written"):
        train_on(damaged, one, lambda stage, *_: told.append(stage))
    assert not one.out.exists()
    assert told == []


@pytest.mark.parametrize(
    ("own_share", "broken", "problem"),
    [
        (0.5, slice(None), "cannot write text: the model's logits are not numbers"),
        (0.5, "some", "the target cannot write text: the model's logits are not numbers"),
        # What it is measured on is always written by the target itself.
        (0.0, "some", "the target cannot write text: the model's logits are not numbers"),
    ],
)
def test_target_whose_weights_are_no_numbers_is_refused_by_the_name_of_its_setting(
    job: JobMaker, changed: ChangedTarget, own_share: float, broken: slice | str, problem: str
) -> None:
    model = changed("broken")
    tokenizer = ModelTokenizer(read_model_directory(model))
    tokens = tokenizer.encode_text((model / "text.txt").read_text())[40] if broken == "some" else broken
    break_embedding(model, tokens)
    one = job("eagle", model=model)

    with pytest.raises(ConfigError, match=f"^HEADRACE_TARGET: .*{problem}"):
        train_draft(replace(one, material=replace(one.material, own_share=own_share)), ignore)


def test_target_that_computes_no_numbers_from_given_text_is_refused(changed: ChangedTarget) -> None:
    model = changed("broken")
    break_embedding(model, 7)
    vectors = HiddenVectors(model, torch.float32, 8)
    assert vectors.of(torch.arange(10, 18)).isfinite().all()

    with pytest.raises(ConfigError, match=r"^HEADRACE_TARGET: .*computes vectors that are not numbers: its weights"):
        vectors.of(torch.arange(8))


def test_least_time_trains_one_step(job: JobMaker) -> None:
    one = replace(job("medusa"), length=Length(None, 1e-9))

    assert train_draft(one, ignore).steps == 1


@pytest.mark.parametrize(
    ("text", "window", "problem"),
    [
        ("", 32, "has 0 tokens in all; training needs at least 64"),
        ("short", 32, "training needs at least 64: give more text, or less window"),
        ("any", 64, "is 64; this target takes less than 64 tokens"),
    ],
)
def test_text_and_window_must_do(job: JobMaker, tmp_path: Path, text: str, window: int, problem: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text)
    one = job("eagle")

    with pytest.raises(ConfigError, match=problem):
        train_draft(replace(one, material=replace(one.material, text=(file,), window=window)), ignore)
    assert not one.out.exists()
