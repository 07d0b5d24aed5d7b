"""A rank reads its part of the files alone, whatever form the weights have: the kernel counts the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models import tensor_reader
from gpu_worker.models.loader import load_model
from tests.gpu_worker.execution.ranks.test_divided_models import FORMS, assert_divisible
from tests.gpu_worker.execution.ranks.test_divided_models import load as load_part
from tests.gpu_worker.execution.ranks.thread_ranks import ThreadRanks, on_ranks
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.quantization.checkpoints import make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.test_mxfp4 import save_packed

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux' counts of bytes read")

CPU = torch.device("cpu")
# Norms, routers, headers, and runs that are shorter still.
SMALL = 160 << 10
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "num_hidden_layers": 2,
}
MIXTURE = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "eos_token_id": None}
PHI = {**SIZES, "pad_token_id": 0}


def _form(name: str, family: str = "Llama") -> Callable[[Path], object]:
    settings, pack, _ = FORMS[name]
    return lambda path: make_checkpoint(path, settings, pack, family, **SIZES)


GPT_OSS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "intermediate_size": 512}
MODELS: dict[str, Callable[[Path], object]] = {
    **{name: _form(name) for name in FORMS if name not in ("gptq-act-order", "fp8-blocks-apart", "gptq-head")},
    "dense": lambda path: save_case(Case("Llama", SIZES), path),
    "fused": lambda path: save_case(Case("Phi3", PHI), path),
    "experts": lambda path: save_case(Case("Qwen3Moe", {**MIXTURE, "num_experts": 4}), path),
    "mxfp4": lambda path: save_packed(path, Case("GptOss", GPT_OSS)),
    "gguf": lambda path: write_model(path / "model.gguf", "llama-mixed", **SIZES),
    "gguf-experts": lambda path: write_model(path / "model.gguf", "gpt-oss", **SIZES),
}
FAST = ("dense", "gptq", "gguf")


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of small models are as short as what is not worth reading by itself in large ones."""
    monkeypatch.setattr(tensor_reader, "_LEAST_RUN_BYTES", 32)


def bytes_read() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)


def reading(directory: Path, *, has_whole_experts: bool = False) -> list[int]:
    """Return the bytes that each of two ranks reads of the files; they load one after the other."""
    counts = []

    def load(ranks: ThreadRanks) -> None:
        before = bytes_read()
        load_part(directory, ranks)
        counts.append(bytes_read() - before)

    def by_turns(ranks: ThreadRanks) -> None:
        for rank in range(ranks.size):
            if rank == ranks.rank:
                load(ranks)
            ranks.sum(torch.zeros(1))

    on_ranks(2, by_turns, has_whole_experts=has_whole_experts)
    return counts


def size_of(directory: Path) -> int:
    return sum(os.path.getsize(path) for path in directory.iterdir() if path.suffix in (".safetensors", ".gguf"))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_rank_reads_half_of_the_files(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    load_model(tmp_path, torch.float32, CPU)
    whole = size_of(tmp_path)
    assert whole > 10 * SMALL
    for count in reading(tmp_path):
        assert 0.4 * whole < count < whole / 2 + SMALL, f"{count} of {whole} bytes"


@pytest.mark.slow
# In fp8 ranks round their own inputs: `test_divided_models` compares those.
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("fp8")])
def test_what_is_read_in_part_scores_as_the_whole(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    assert_divisible(tmp_path, 2)


@pytest.mark.slow
def test_a_rank_with_some_experts_reads_those(tmp_path: Path) -> None:
    MODELS["mxfp4"](tmp_path)
    for count in reading(tmp_path, has_whole_experts=True):
        assert count < size_of(tmp_path) / 2 + SMALL


@pytest.mark.slow
def test_inputs_in_another_order_are_read_whole_where_they_are_divided(tmp_path: Path) -> None:
    settings, pack, _ = FORMS["gptq-act-order"]
    make_checkpoint(tmp_path, settings, pack, **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    by_rows = sum(tensor.nbytes for name, tensor in tensors.items() if "o_proj" in name or "down_proj" in name)
    for count in reading(tmp_path):
        assert count < (size_of(tmp_path) + by_rows) / 2 + SMALL
