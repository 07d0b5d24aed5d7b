from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.cli.quantize import command
from ops.demo_model.corpus import held_out_documents, standard_library
from ops.quantize.job import Advance, quantize
from ops.quantize.job_settings import QuantizeJob
from ops.quantize.layer_pass import check_stream_fits
from ops.stack.config import DEMO_MODEL
from shared.errors import ConfigError
from tests.ops.cli.command import headrace
from tests.ops.quantize.layer_models import CPU, TOKENS, job_for, logits_of, save_model, tensors_of

METHODS = ("int8", "fp8", "rtn-int4", "gptq")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(directory, request.param, attention_bias=request.param == "qwen3", tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    save_model(directory, tie_word_embeddings=False)
    return directory


def unpacked(packed: torch.Tensor, per_word: int) -> torch.Tensor:
    """Take the values out of each word of a row, the lowest bits first."""
    words = packed.to(torch.int64) & 0xFFFFFFFF
    levels = 2 ** (32 // per_word)
    return torch.stack([words // levels**place % levels for place in range(per_word)], -1).float().flatten(-2)


def dense_by_formula(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Read a matrix by the plain formula of GPTQ's convention, `[out_features, in_features]`."""
    part = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
    per_word = 4 if module == "lm_head" else 8
    values, zeros = unpacked(part["qweight"].T, per_word).T, unpacked(part["qzeros"], per_word) + 1
    groups = part["g_idx"].long()
    return ((values - zeros[groups]) * part["scales"].float()[groups]).T


def test_checkpoint_computes_what_its_formula_says(model: Path, tmp_path: Path) -> None:
    list(quantize(job_for(model, tmp_path / "out", "gptq")))

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stored = tensors_of(tmp_path / "out")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = dense_by_formula(stored, name)
        elif f"{name}.weight" in stored and "norm" in name:
            module.weight.data = stored[f"{name}.weight"].float()
        if f"{name}.bias" in stored:
            module.bias.data = stored[f"{name}.bias"].float()
    assert_same_logits(oracle, tmp_path / "out")


def test_head_of_gptq_computes_what_its_formula_says(untied_model: Path, tmp_path: Path) -> None:
    list(quantize(replace(job_for(untied_model, tmp_path / "out", "gptq"), lm_head=True)))

    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["lm_head"] is True
    assert settings["dynamic"] == {"+:lm_head": {"bits": 8}}
    dense = load_file(untied_model / "model.safetensors")["lm_head.weight"]
    stored = dense_by_formula(tensors_of(tmp_path / "out"), "lm_head")
    # Half a level of 255 at most, and as much again at the largest value, whose level lies beyond the end.
    assert float((stored - dense).abs().max()) <= 1.01 * float(dense.abs().max()) / 127.5
    config = read_model_config(tmp_path / "out")
    assert config.quantization is not None
    with Checkpoint(tmp_path / "out", torch.float32, CPU) as checkpoint:
        ours = config.quantization.take(checkpoint, "lm_head", *dense.shape)
        torch.testing.assert_close(ours.dequantize(), stored, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["int8", "fp8", "rtn-int4"])
def test_head_is_read_alike_by_transformers(method: str, untied_model: Path, tmp_path: Path) -> None:
    list(quantize(replace(job_for(untied_model, tmp_path / "out", method), lm_head=True)))

    assert_layers_are_read_alike(tmp_path / "out", has_head=True)
    dense = load_file(untied_model / "model.safetensors")["lm_head.weight"]
    assert tensors_of(tmp_path / "out")["lm_head.weight"].itemsize == 1
    oracle = dequantized(tmp_path / "out")
    assert float((oracle.lm_head.weight.data - dense).norm() / dense.norm()) < 0.03


@pytest.mark.parametrize("method", METHODS)
def test_head_of_a_tied_vocabulary_is_a_rounded_copy(method: str, model: Path, tmp_path: Path) -> None:
    job = job_for(model, tmp_path / "plain", method)
    list(quantize(job))
    list(quantize(replace(job, out=tmp_path / "head", lm_head=True)))

    plain, head = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "head")
    assert torch.equal(head["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    assert {name.partition(".")[0] for name in head.keys() - plain.keys()} == {"lm_head"}
    config = read_model_config(tmp_path / "head")
    assert not config.tie_word_embeddings
    assert config.quantization is not None
    with Checkpoint(tmp_path / "head", torch.float32, CPU) as checkpoint:
        rounded = config.quantization.take(checkpoint, "lm_head", config.vocab_size, config.hidden_size)
    embedding = plain["model.embed_tokens.weight"].float()
    assert rounded.num_bytes < 0.6 * embedding.nbytes / 2 + 16 * config.vocab_size
    assert float((rounded.dequantize() - embedding).norm() / embedding.norm()) < 0.03
    expected, actual = (logits_of(tmp_path / name) for name in ("plain", "head"))
    # In fp8 inputs of the head are rounded too, to four significant bits as its weights are.
    assert float((actual - expected).norm() / expected.norm()) < (0.05 if method == "fp8" else 0.03)


@pytest.mark.parametrize("method", ["int8", "rtn-int4"])
def test_rounded_copy_of_a_tied_vocabulary_is_read_alike_by_transformers(
    method: str, model: Path, tmp_path: Path
) -> None:
    list(quantize(replace(job_for(model, tmp_path / "out", method), lm_head=True)))

    oracle = dequantized(tmp_path / "out")
    head, embedding = oracle.lm_head.weight.data, oracle.model.embed_tokens.weight.data
    assert head.data_ptr() != embedding.data_ptr()
    assert 0 < float((head - embedding).norm() / embedding.norm()) < 0.03


def dequantized(directory: Path) -> Any:
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        oracle(torch.tensor([[1, 2, 3]]))  # it dequantizes its weights when they are first used
    return oracle


def assert_layers_are_read_alike(directory: Path, *, has_head: bool) -> None:
    oracle = dequantized(directory)
    config = read_model_config(directory)
    assert config.quantization is not None
    with Checkpoint(directory, torch.float32, CPU) as checkpoint:
        for name, module in oracle.named_modules():
            if isinstance(module, torch.nn.Linear) and (has_head or name != "lm_head"):
                ours = config.quantization.take(checkpoint, name, *module.weight.shape)
                torch.testing.assert_close(ours.dequantize(), module.weight.data, rtol=1e-6, atol=0)


def assert_same_logits(oracle: Any, directory: Path) -> None:
    with torch.inference_mode():
        expected = oracle(TOKENS[None]).logits[0]
    actual = logits_of(directory)
    assert float((actual - expected).norm() / expected.norm()) <= 1e-4


def test_interrupted_job_leaves_no_model_and_its_folder_is_not_taken(model: Path, tmp_path: Path) -> None:
    job = job_for(model, tmp_path, "int8")
    steps = quantize(job)
    while "layer 1" not in next(steps).name:
        pass
    steps.close()
    with pytest.raises(CheckpointError):
        load_model(tmp_path, torch.float32, CPU)
    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        next(quantize(job))


@pytest.mark.slow
def test_methods_cost_quality_in_the_order_of_their_effort(tmp_path: Path) -> None:
    """On a model that was trained: random ones have no directions that matter more than others."""
    (tmp_path / "text").write_text(
        "".join(path.read_text() for path in sorted(standard_library().glob("asyncio/*.py")))[:200_000]
    )
    held_out = ModelTokenizer(read_model_directory(DEMO_MODEL)).encode_text(held_out_documents()[0])[:500]
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([held_out])).logits[0].log_softmax(-1)
    lost, agreement = {}, {}
    for method in METHODS:
        job = job_for(DEMO_MODEL, tmp_path / method, method)
        list(quantize(replace(job, group_size=64, calibration=tmp_path / "text", samples=8, window=128)))
        actual = logits_of(tmp_path / method, torch.tensor(held_out)).log_softmax(-1)
        lost[method] = float((expected.exp() * (expected - actual)).sum(-1).mean())
        agreement[method] = float((expected.argmax(-1) == actual.argmax(-1)).double().mean())

    assert lost["int8"] < lost["fp8"] < lost["gptq"]
    assert lost["gptq"] < 0.6 * lost["rtn-int4"]
    # How often the most likely token stays the same.
    assert agreement["int8"] > 0.96
    assert agreement["fp8"] > 0.92
    assert agreement["gptq"] > max(0.87, agreement["rtn-int4"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 128}, "is 128, which must divide .*; name 32$"),
        ({"calibration": None}, "HEADRACE_CALIBRATION"),
        ({"calibration": Path("/nowhere/text")}, "cannot be read"),
    ],
)
def test_jobs_that_cannot_work_are_refused(changes: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        next(quantize(replace(job_for(model, tmp_path / "out", "gptq"), **changes)))


def test_windows_that_do_not_fit_the_memory_are_refused() -> None:
    gib = 1 << 30
    check_stream_fits(128, 2048, 4096, 8 * gib)
    with pytest.raises(ConfigError, match=r"HEADRACE_SAMPLES: 128 windows .* 4\.3 GB.* use 64 at most"):
        check_stream_fits(128, 2048, 4096, 4 * gib)
    with pytest.raises(ConfigError, match="HEADRACE_WINDOW"):
        check_stream_fits(1, 2048, 4096, gib // 64)


def test_short_or_binary_calibration_texts_are_refused(model: Path, tmp_path: Path) -> None:
    job = job_for(model, tmp_path / "out", "gptq")
    for content, message in ((b"short", "needs 32"), (b"\xff\xfe\x00", "not UTF-8")):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            next(quantize(replace(job, calibration=tmp_path / "text")))
        # Another text may follow under the same name.
        assert not job.out.exists()


def test_quantized_models_and_taken_folders_are_refused(model: Path, tmp_path: Path) -> None:
    list(quantize(job_for(model, tmp_path / "out", "int8")))

    with pytest.raises(
        ConfigError, match=r"quantized already \(.*\); serve it as it is, or name the model that it was made from"
    ):
        next(quantize(job_for(tmp_path / "out", tmp_path / "again", "int8")))
    with pytest.raises(ConfigError, match="not empty"):
        next(quantize(job_for(model, tmp_path / "out", "fp8")))


def test_command_writes_a_model_that_the_next_command_reads(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    text = model / "text.txt"
    save_model(model)

    made = headrace(
        "quantize", "--method", "gptq", "--model", str(model), "--out", str(out), "--group-size", "32",
        "--calibration", str(text), "--samples", "4", "--window", "32",
    )  # fmt: skip
    read = headrace("perplexity", "--model", str(out), "--text", str(text), "--context", "48")

    assert made.returncode == 0, made.stderr
    assert read.returncode == 0, read.stderr
    assert json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert "perplexity" in read.stdout


def test_command_that_is_interrupted_says_what_it_left(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(job: QuantizeJob) -> Iterator[Advance]:
        yield Advance(1, 9, "layer 0")
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.quantize.job.quantize", stopped)
    arguments = ["--method", "int8", "--model", str(model), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, SystemExit)
    told = f"interrupted; delete {tmp_path / 'out'} before you start again: it is incomplete"
    assert told in result.output.splitlines()


def test_device_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    arguments = ["--method", "int8", "--model", str(DEMO_MODEL), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="--device: is 'cuda:99'; this machine has: cpu"):
        command.main([*arguments, "--device", "cuda:99"], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_sizes_that_no_group_divides_are_refused_with_the_methods_that_do_without(tmp_path: Path) -> None:
    save_model(tmp_path, intermediate_size=100)
    with pytest.raises(ConfigError, match=r"GROUP_SIZE: is 32, which .*; no group size does: use int8 or fp8$"):
        next(quantize(replace(job_for(tmp_path, tmp_path / "out", "rtn-int4"), calibration=None)))
