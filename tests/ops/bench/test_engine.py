"""The engine benchmark: what it counts, how it compares, and that it runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from click.testing import CliRunner

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.fp8 import FP8
from ops.bench import record
from ops.bench.comparison import OURS, add_rows
from ops.bench.engine import (
    LARGE_READ_BYTES,
    EngineBench,
    Load,
    Measurement,
    bandwidth_share,
    medians,
    read_bandwidth,
    share_text,
)
from ops.bench.make_model import SHAPES, Shape, make_model, weight_shapes
from ops.bench.peers import convert_to_gguf
from ops.cli.bench import command
from ops.sizing.traffic import bytes_per_decode_step
from tests.gpu_worker.quantization.gguf.llama_cpp import VARIABLE, find_llama_cpp

SHAPE = Shape(96, 32, 48, 2, 4, 2, is_tied=False, max_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shape")
    make_model(SHAPE, directory)
    return directory


@pytest.mark.parametrize(
    ("step_bytes", "step_s", "share", "text"),
    [
        (100, 2.0, 0.5, "50%"),
        (100, 1.0, 1.0, "100%"),
        # No share above 100 % is printed, and none is made 100 % that is not: a wrong count of bytes would not show.
        (100, 0.5, None, "in cache"),
        (LARGE_READ_BYTES, LARGE_READ_BYTES / 200, None, "above peak"),
    ],
)
def test_step_that_is_faster_than_a_plain_read_has_no_share(
    step_bytes: int, step_s: float, share: float | None, text: str
) -> None:
    assert bandwidth_share(step_bytes, step_s, 100.0) == share
    assert share_text(share, step_bytes) == text


def test_read_of_few_bytes_is_measured_with_as_many() -> None:
    # A step of a small model reads out of a cache; compared with memory it would read faster than is possible.
    assert all(rate > 1e8 for rate in map(read_bandwidth, (1, 5 << 20)))


def test_every_batch_size_is_measured(model: Path) -> None:
    bench = EngineBench(model, dtype="bfloat16", num_threads=1, max_load=Load(3, 9, 4), token_budget=8, block_size=4)
    for batch in (1, 3):
        result = bench.measure(Load(batch, 9, 4))
        assert result.step_s is not None
        assert result.prefill_rate > 0
        assert result.decode_rate == pytest.approx(batch / result.step_s, rel=5)


def test_command_writes_a_line_a_batch_size(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "results.jsonl"
    arguments = ["engine", "--model", str(model), "--batch", "1,2", "--prompt", "8", "--new", "2", "--rounds", "1"]
    result = CliRunner().invoke(command, [*arguments, "--num-threads", "1", "--json", str(target)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["decode_tokens_per_s"] > 0 and row["dtype"] == "bfloat16" for row in rows)


@pytest.mark.parametrize("text", [",", "0", "1,x"])
def test_bad_batch_list_is_refused(model: Path, text: str) -> None:
    result = CliRunner().invoke(command, ["engine", "--model", str(model), "--batch", text])
    assert "--batch:" in str(result.exception)


def test_load_longer_than_the_model_allows_is_refused(model: Path) -> None:
    result = CliRunner().invoke(command, ["engine", "--model", str(model), "--batch", "1", "--prompt", "64"])
    assert "64 at most" in str(result.exception)


@pytest.mark.parametrize("attends_every", [0, 2])
def test_bytes_of_a_step_are_the_multiplied_weights_the_context_and_the_states(
    tmp_path: Path, attends_every: int
) -> None:
    make_model(replace(SHAPE, attends_every=attends_every), tmp_path)
    config, sizes = read_model_config(tmp_path), sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    alone, two, longer = (_bytes(config, batch, context) for batch, context in ((1, 0), (2, 0), (2, 12)))
    state = 4 * 8 * 8 * 4 if attends_every else 0
    assert two - alone == state
    assert alone - state == pytest.approx(sizes - 96 * 32 * 2, rel=0.15)
    num_attending = 1 if attends_every else 2
    assert longer - two == 2 * 12 * num_attending * (2 * 2 * 8) * 2


def test_experts_that_tokens_meet_are_counted_once(tmp_path: Path) -> None:
    make_model(replace(SHAPE, num_experts=4), tmp_path)
    config, expert = read_model_config(tmp_path), 3 * 32 * 48
    one, two, all_ = (_bytes(config, batch, 0) for batch in (1, 2, 1000))
    # A token has 2 of 4; another has one of those that the first has not.
    assert two - one == 2 * 2 * expert
    assert all_ - one == 2 * 2 * (2 * expert)


def test_bytes_of_weights_in_codes_are_not_guessed(model: Path) -> None:
    quantized = replace(read_model_config(model), quantization=FP8(is_static=False, has_blocks=False))
    assert bytes_per_decode_step(quantized, torch.bfloat16, 1, 0) is None


def _bytes(config: ModelConfig, batch: int, context: int) -> int:
    result = bytes_per_decode_step(config, torch.bfloat16, batch, context)
    assert result is not None
    return result


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_experts": 4}, {"attends_every": 2}], ids=["dense", "moe", "hybrid"])
def test_model_becomes_the_file_that_its_peer_reads(options: dict[str, int], tmp_path: Path) -> None:
    tools = find_llama_cpp()
    if tools is None:
        pytest.skip(f"llama.cpp's sources are not on this machine: set {VARIABLE} to their folder")
    shape, path = replace(SHAPE, **options), tmp_path / "model.gguf"
    make_model(shape, tmp_path)
    command = [sys.executable, convert_to_gguf.__file__, str(tools.sources), str(tmp_path), str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    reader = gguf.GGUFReader(path)
    plain = [tensor.data for tensor in reader.tensors if tensor.tensor_type.name == "F32"]
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "BF16"}
    # Matrices keep their bits, but for the small ones that llama.cpp wants in float32.
    assert sum(tensor.n_elements for tensor in reader.tensors) == sum(map(math.prod, weight_shapes(shape).values()))
    assert all(data.size < shape.hidden_size * 16 for data in plain)
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    assert (len(words), words[3]) == (shape.vocab_size, "\N{LOWER ONE EIGHTH BLOCK}w3")


def test_medians_are_taken_of_each_figure() -> None:
    results = [Measurement(1, 30, 3), Measurement(2, 10, 1), Measurement(3, 20, 2)]
    assert medians(results) == Measurement(2, 20, 2)


def test_rows_are_printed_and_recorded_with_the_ratio_to_the_best_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "_RESULTS", tmp_path)
    results = {
        (OURS, 1): Measurement(5, 30.0, 1e-3, 0.75),
        (OURS, 4): Measurement(7, 90.0),
        ("peer", 4): Measurement(8, 60.0),
        ("slow", 4): Measurement(9, 20.0),
    }
    table = record.ResultTable(
        "engine", ("engine", "batch", "decode_tokens_per_s", "of_best_peer", "prefill_tokens_per_s")
    )
    add_rows(table, results, {"peer": "peer 1.2"}, {"absent": "no cmake"}, model="15m")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        [OURS, "1", "30.0", "-", "5"],
        [OURS, "4", "90.0", "1.5", "7"],
        ["peer", "4", "60.0", "-", "8"],
        ["slow", "4", "20.0", "-", "9"],
        ["absent:", "not", "available:", "no", "cmake"],
    ]
    rows = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    assert [row["engine_version"] for row in rows] == [None, None, "peer 1.2", None]
    assert [row.get("bandwidth_fraction") for row in rows] == [0.75, None, None, None]
    assert {(row["model"], *row["not_available"]) for row in rows} == {("15m", "absent")}


def test_shapes_have_the_parameters_of_their_names() -> None:
    for size, millions in (("15m", 15), ("160m", 160), ("1b", 1236)):
        count = sum(math.prod(shape) for shape in weight_shapes(SHAPES[size]).values()) / 1e6
        assert count == pytest.approx(millions, rel=0.15), size
    assert SHAPES["1b"].is_tied
