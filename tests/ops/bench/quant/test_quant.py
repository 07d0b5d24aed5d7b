"""The benchmark of quantized models: what it makes, measures and writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ops.bench.engine import Load, Measurement
from ops.bench.make_model import Shape, make_model
from ops.bench.peers.engines import Task, measure_ours
from ops.bench.quant.__main__ import measure, most_likely, quality, rows
from ops.bench.quant.checkpoints import (
    METHODS,
    PLAIN,
    all_methods,
    make_checkpoints,
    random_words,
    training_text,
    weight_bytes,
)

TINY = Shape(
    vocab_size=160, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4, num_kv_heads=2, is_tied=True
)


def test_every_method_makes_a_smaller_model(tmp_path: Path) -> None:
    make_model(TINY, tmp_path / PLAIN)
    calibration = random_words(TINY.vocab_size, tmp_path / "text")
    made = dict(make_checkpoints(tmp_path / PLAIN, tmp_path, list(METHODS), calibration))
    assert list(made) == list(METHODS)
    assert all(weight_bytes(path) < weight_bytes(tmp_path / PLAIN) for path in made.values())


def test_heads_are_rounded_too(tmp_path: Path) -> None:
    make_model(replace(TINY, is_tied=False), tmp_path / PLAIN)
    assert all_methods() == [*METHODS, "int8+head", "fp8+head", "rtn-int4+head", "gptq+head"]
    calibration = random_words(TINY.vocab_size, tmp_path / "text")
    made = dict(make_checkpoints(tmp_path / PLAIN, tmp_path, ["rtn-int4", "rtn-int4+head"], calibration))
    saved = weight_bytes(made["rtn-int4"]) - weight_bytes(made["rtn-int4+head"])
    # A byte less for each of the head's weights, less its scales.
    assert 0.8 * 160 * 64 < saved < 160 * 64


def test_quality_of_a_model_beside_itself_and_beside_another(tmp_path: Path) -> None:
    make_model(TINY, tmp_path / PLAIN)
    calibration = random_words(TINY.vocab_size, tmp_path / "text")
    made = dict(make_checkpoints(tmp_path / PLAIN, tmp_path, ["rtn-int4"], calibration))
    text = [index * 7 % 160 for index in range(600)]
    reference = most_likely(tmp_path / PLAIN, text, 1)
    same, rounded = (quality(path, text, reference, 1) for path in (tmp_path / PLAIN, made["rtn-int4"]))
    assert same["same_token_percent"] == 100
    assert same["held_out_tokens"] == 599
    assert 20 < rounded["same_token_percent"] < 100
    assert rounded["perplexity"] != same["perplexity"]


@pytest.mark.slow
def test_quantized_model_is_measured_beside_the_plain_one(tmp_path: Path) -> None:
    make_model(TINY, tmp_path / PLAIN)
    calibration = random_words(TINY.vocab_size, tmp_path / "text")
    models = {PLAIN: tmp_path / PLAIN, **dict(make_checkpoints(tmp_path / PLAIN, tmp_path, ["int8"], calibration))}
    task = Task(models[PLAIN], [Load(1, 8, 2), Load(2, 8, 2)], 1)
    sizes, measured, missing = measure(task, models, tmp_path / "nowhere", rounds=1)
    assert list(sizes) == [PLAIN, "int8"]
    assert list(measured) == [(PLAIN, 1), (PLAIN, 2), ("int8", 1), ("int8", 2)]
    assert not missing
    assert isinstance(measure_ours(task)[1], Measurement)


def test_rows_name_batch_sizes_and_leave_out_what_was_not_measured() -> None:
    sizes = {"bf16": 4_000_000, "int8": 2_000_000, "bf16, KV fp8": 4_000_000}
    measured = {
        ("bf16", 1): Measurement(50.0, 10.0),
        ("int8", 1): Measurement(50.0, 25.0),
        ("int8", 4): Measurement(60.4, 30.0),
    }
    plain, int8, cache = rows(sizes, measured, {"int8": {"perplexity": 17.25}, "bf16, KV fp8": {"perplexity": 17.5}})
    assert plain["of_bf16_at_1"] == 1.0
    assert int8 == {
        "name": "int8",
        "weights_mb": 2.0,
        "perplexity": 17.25,
        "decode_tokens_per_s_at_1": 25.0,
        "decode_tokens_per_s_at_4": 30.0,
        "prefill_tokens_per_s": 60,
        "of_bf16_at_1": 2.5,
    }
    assert cache == {"name": "bf16, KV fp8", "weights_mb": 4.0, "perplexity": 17.5}


def test_calibration_text_is_of_the_corpus(tmp_path: Path) -> None:
    calibration = training_text(tmp_path / "text")
    assert len(calibration.text.read_text(encoding="utf-8")) > 100_000
