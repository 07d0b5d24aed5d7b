"""Files that llama.cpp's own tools write, against `transformers` and the `gguf` package's dequantization.

Its sources are looked for where the benchmarks keep them, or in what `HEADRACE_LLAMA_CPP` names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES
from gpu_worker.quantization.gguf.tensor_names import ENCODERS as ENCODER_FILES
from gpu_worker.text.model_directory import read_model_directory
from tests.gpu_worker.execution.engine_run import make_runner, run
from tests.gpu_worker.execution.pooled_sequences import assert_logits, assert_vectors, sequence_of
from tests.gpu_worker.execution.test_encoders import BERTS, prompt_of, saved
from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.quantization.gguf.converted import Converted
from tests.gpu_worker.quantization.gguf.family_files import CASES
from tests.gpu_worker.quantization.gguf.llama_cpp import (
    VARIABLE,
    Job,
    LlamaCpp,
    convert,
    dequantize,
    find_llama_cpp,
    quantize,
    save_checkpoint,
    write_tokenizer,
)
from tests.gpu_worker.quantization.gguf.llama_cpp_converter import NULLS, PUBLISHED
from tests.gpu_worker.quantization.gguf.written_file import assert_file_equals, file_logits

pytestmark = pytest.mark.slow

# A prompt in two chunks, then two tokens one by one.
CHUNKS = (35, 23, 1, 1)
# In so wide models, rows of most matrices have whole blocks of 256 numbers; the others get what they have blocks for.
WIDE = {"hidden_size": 256, "intermediate_size": 256}
KINDS = ("Q4_0", "Q8_0", "Q4_K_M", "Q6_K")
WIDE_CASES: Mapping[str, Mapping[str, int]] = {
    **{name: {} for name in ("llama", "qwen3moe", "gemma3", "deepseek-v3", "phi3", "gptneox", "arcee", "ernie4_5-moe")},
    **{name: {} for name in ("dots1", "gpt-oss", "llama4", "nemotron_h_moe", "qwen35moe", "falcon-h1", "lfm2moe")},
    "granitehybrid": {"mamba_d_head": 128},
    "mamba2": {"head_dim": 128},
}
# What an option of the converter puts together.
FUSES = {"fuse_qkv": "attn_qkv.weight", "fuse_gate_up_exps": "ffn_gate_up_exps.weight"}
FUSED_QKV = (
    *("llama", "llama-biases", "mixtral", "qwen2", "qwen3moe", "smollm3", "arcee", "ernie4_5-moe", "llama4", "gemma3"),
    *("command-r", "olmo2", "ministral3", "granite", "phi2", "stablelm", "minimax-m2", "granitehybrid", "nemotron_h"),
    *("apertus", "mimo2"),
)
FUSED_CASES = (*((name, "fuse_qkv") for name in FUSED_QKV), ("qwen35moe", "fuse_gate_up_exps"))


class Files(NamedTuple):
    """Where converted files are, what went wrong with which, and the models that they are of."""

    directory: Path
    failures: dict[str, str]
    oracles: dict[str, Any]


@pytest.fixture(scope="module")
def tools() -> LlamaCpp:
    found = find_llama_cpp()
    if found is None:
        pytest.skip(f"llama.cpp's sources are not on this machine: set {VARIABLE} to their folder")
    return found


@pytest.fixture(scope="module")
def files(tools: LlamaCpp, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Convert all in one process, which starts slowly."""
    directory = tmp_path_factory.mktemp("converted")
    oracles = {name: save_checkpoint(case, directory / name) for name, case in CASES.items()}
    jobs = [Job(directory / name, directory / f"{name}.gguf") for name in CASES]
    jobs += [Job(directory / name, directory / f"{name}-fused.gguf", options={how: True}) for name, how in FUSED_CASES]
    return Files(directory, convert(tools, jobs, directory), oracles)


def test_every_architecture_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} | ENCODER_FILES == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_converted_file_equal_transformers(files: Files, name: str) -> None:
    path = files.directory / f"{name}.gguf"
    assert str(path) not in files.failures, files.failures[str(path)]
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == CASES[name].architecture
    assert_file_equals(path, files.oracles[name], CHUNKS)


@pytest.mark.parametrize(("name", "how"), FUSED_CASES)
def test_matrices_that_the_converter_put_together_are_read(files: Files, name: str, how: str) -> None:
    path = files.directory / f"{name}-fused.gguf"
    assert str(path) not in files.failures, files.failures[str(path)]
    assert any(tensor.name.endswith(FUSES[how]) for tensor in gguf.GGUFReader(path).tensors)
    assert_file_equals(path, files.oracles[name], CHUNKS)


def _assert_vectors_equal(path: Path, model: Any) -> None:
    """Compare the mean vectors of two prompts with those of `transformers`."""
    sequences = [sequence_of(str(length), prompt_of(length), PoolingPlan("mean", is_whole=True)) for length in (3, 40)]
    run(make_runner(path, dtype="float32"), sequences, token_budget=64)
    assert_vectors(model, sequences)


@pytest.mark.parametrize("name", BERTS)
def test_vectors_of_a_converted_encoder_equal_transformers(tools: LlamaCpp, tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name)
    write_tokenizer(tmp_path)
    (tmp_path / PUBLISHED).write_text("{}")
    path = tmp_path / "encoder.gguf"
    assert convert(tools, [Job(tmp_path, path)], tmp_path) == {}
    _assert_vectors_equal(path, model)
    assert read_model_config(path).architecture == ("BertModel" if name == "bert" else "RobertaModel")


# Fields of published checkpoints, which the converter reads.
ROTARY: Mapping[str, Mapping[str, Any]] = {
    "modernbert": {"global_attn_every_n_layers": 3},
    "modernbert-options": {"layer_types": None, "global_attn_every_n_layers": 2},
    "nomic": {
        **{"n_positions": 2048, "max_trained_positions": 2048, "activation_function": "swiglu", "causal": False},
        **{"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False},
        **{"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, NULLS: ["rotary_emb_scale_base"]},
    },
    "jina-v3": {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["one"], "rotary_emb_base": 20_000.0},
    "eurobert": {"classifier_pooling": "mean"},
    "eurobert-mqa": {"classifier_pooling": "mean", "head_dim": 12},
}
# Of its layers all but every second have windows, since that is all that its file can say.
ROTARY_OPTIONS = {
    "modernbert-options": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "eurobert-mqa": {"head_dim": 12},
}


@pytest.mark.parametrize("name", ROTARY)
def test_vectors_of_a_converted_rotary_encoder_equal_transformers(tools: LlamaCpp, tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, **ROTARY_OPTIONS.get(name, {}))
    write_tokenizer(tmp_path)
    (tmp_path / PUBLISHED).write_text(json.dumps(ROTARY[name]))
    path = tmp_path / "encoder.gguf"
    assert convert(tools, [Job(tmp_path, path)], tmp_path) == {}
    _assert_vectors_equal(path, model)
    assert read_model_directory(path).is_encoder


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_scores_of_a_converted_reranker_equal_transformers(tools: LlamaCpp, tmp_path: Path, name: str) -> None:
    model = saved(tmp_path, name, "ForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    (tmp_path / PUBLISHED).write_text("{}")
    path = tmp_path / "reranker.gguf"
    assert convert(tools, [Job(tmp_path, path)], tmp_path) == {}
    plan = PoolingPlan("first", "classes", is_whole=True)
    sequences = [sequence_of(str(length), prompt_of(length), plan) for length in (3, 40)]
    run(make_runner(path, dtype="float32"), sequences, token_budget=64)
    for sequence in sequences:
        assert_logits(model, sequence)
    assert read_model_directory(path).num_classes == 1


def widened(case: Converted, options: Mapping[str, int]) -> Converted:
    return replace(case, options={**case.options, **WIDE, **options})


@pytest.fixture(scope="module")
def wide_files(tools: LlamaCpp, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if tools.quantizer is None:
        pytest.skip("llama-quantize is not built: build llama.cpp into `build` in the folder of its sources")
    directory = tmp_path_factory.mktemp("quantized")
    for name, options in WIDE_CASES.items():
        save_checkpoint(widened(CASES[name], options), directory / name)
    jobs = [
        Job(directory / name, directory / f"{name}-{kind}.gguf", kind) for name in WIDE_CASES for kind in ("f16", "f32")
    ]
    assert convert(tools, jobs, directory) == {}
    return directory


@pytest.mark.parametrize("kind", ["f16", *KINDS])
@pytest.mark.parametrize("name", WIDE_CASES)
def test_logits_of_a_quantized_file_equal_those_of_its_numbers(
    tools: LlamaCpp, wide_files: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """The numbers are those that the `gguf` package reads of its blocks."""
    path = wide_files / f"{name}-{kind}.gguf"
    if kind in KINDS:
        path = tmp_path / f"{kind}.gguf"
        quantize(tools, wide_files / f"{name}-f32.gguf", path, kind)
    types = dequantize(path, tmp_path / "numbers.gguf")
    assert kind.upper().removesuffix("_M") in types
    tokens = torch.randint(SIZES["vocab_size"], (sum(CHUNKS),), generator=torch.Generator().manual_seed(7))
    logits, expected = (file_logits(file, tokens, CHUNKS) for file in (path, tmp_path / "numbers.gguf"))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
