"""Models that are not what their metadata say, or that cannot be served: each is refused, by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.models.loader import load_model
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair
from tests.gpu_worker.quantization.gguf.written_file import written

Change = Callable[["Parts"], Any]
Q, K = "blk.0.attn_q.weight", "blk.0.attn_k.weight"


class Parts:
    """The fields and tensors of a file, to be changed and written again."""

    def __init__(self, path: Path) -> None:
        with GGUFFile(path) as file:
            self.fields = dict(file.metadata.fields)
            self.tensors = {
                name: (info.type.number, file.rows(info, 0, info.num_bytes // info.row_bytes), info.shape)
                for name, info in file.tensors.items()
            }

    def resize(self, name: str, rows: int) -> None:
        number, raw, shape = self.tensors[name]
        self.tensors[name] = (number, np.resize(raw, (rows, raw.shape[1])), (rows, *shape[1:]))

    def add_dense(self, name: str, *shape: int) -> None:
        self.tensors[name] = (0, np.ones(shape, np.float32).reshape(-1, shape[-1]).view(np.uint8), shape)

    def write(self, path: Path) -> None:
        with written(path, self.fields.pop("general.architecture", "none")) as writer:
            for key, value in self.fields.items():
                if isinstance(value, list | np.ndarray):
                    if len(value):
                        writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
                elif isinstance(value, str):
                    writer.add_string(key, value)
                elif isinstance(value, bool):
                    writer.add_bool(key, value)
                else:
                    (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
            for name, (number, raw, shape) in self.tensors.items():
                kind = gguf.GGMLQuantizationType(number)
                data = raw.view(np.float32).reshape(shape) if number == 0 else raw
                writer.add_tensor(name, data, raw_dtype=None if number == 0 else kind)


def field(name: str, value: Any) -> Change:
    return lambda parts: parts.fields.update({name: value})


def without(name: str) -> Change:
    return lambda parts: parts.fields.pop(name) if name in parts.fields else parts.tensors.pop(name)


def poisoned(name: str) -> Change:
    def change(parts: Parts) -> None:
        raw = parts.tensors[name][1]
        raw[-1, -34:-32] = np.frombuffer(struct.pack("<e", float("nan")), np.uint8)

    return change


DEFECTS: dict[str, tuple[Change, str]] = {
    "architecture": (
        field("general.architecture", "mamba"), "'general.architecture' is 'mamba'; supported: llama, qwen2",
    ),
    "no architecture": (without("llama.block_count"), r"'llama\.block_count' is missing"),
    "blocks": (field("llama.block_count", 0), r"'llama\.block_count' is 0; it must be a whole number from 1 to 1024"),
    "too many blocks": (field("llama.block_count", 3), r"'model\.layers\.2\.input_layernorm\.weight' is missing"),
    "too few blocks": (field("llama.block_count", 1), r"'blk\.1\.attn_norm\.weight' has no place in the model"),
    "heads that share nothing": (field("llama.attention.head_count_kv", 3), "must divide llama.attention.head_count"),
    "heads per layer": (field("llama.attention.head_count_kv", [2, 1]), "is an array of 2; it must be a whole number"),
    "heads that do not divide": (field("llama.attention.head_count", 7), "must divide|must be a multiple of"),
    "odd head": (field("llama.attention.key_length", 63), "is 63; rotary embeddings need an even number"),
    "value heads of another size": (field("llama.attention.value_length", 32), "supported: the size of a key, 64"),
    "partly rotated heads": (field("llama.rope.dimension_count", 32), "supported: the size of a key, 64"),
    "no norm epsilon": (without("llama.attention.layer_norm_rms_epsilon"), "rms_epsilon' is missing"),
    "epsilon that is not a number": (field("llama.attention.layer_norm_rms_epsilon", float("nan")), "number above 0"),
    "epsilon of infinity": (field("llama.attention.layer_norm_rms_epsilon", float("inf")), "number above 0"),
    "context": (field("llama.context_length", 2**31), "must be a whole number from 1 to 16777216"),
    "rope base": (field("llama.rope.freq_base", 0.5), "it must be above 1"),
    "turns of yarn": (
        lambda parts: parts.fields.update(
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.yarn_beta_slow": 1e-30,
            }
        ),
        "yarn_beta_slow' is 1e-30; it must be from",
    ),
    "rope scaling": (field("llama.rope.scaling.type", "longrope"), "'longrope'; supported: none, linear and yarn"),
    "rope factor": (
        lambda parts: parts.fields.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e6}),
        r"rope\.scaling\.factor' makes a context of 1\.28e\+08 tokens; at most 16777216",
    ),
    "rope divisors": (lambda parts: parts.add_dense("rope_freqs.weight", 31), "must be F32 of shape \\[32\\]"),
    "split file": (field("split.count", 3), "split over several files; merge them"),
    "no vocabulary": (without("tokenizer.ggml.tokens"), r"'tokenizer\.ggml\.tokens' is missing"),
    "no embedding": (without("token_embd.weight"), "'token_embd.weight' is missing; the file holds no whole model"),
    "missing tensor": (without(Q), r"'model\.layers\.0\.self_attn\.q_proj\.weight' is missing"),
    "expert tensor": (lambda parts: parts.add_dense("blk.0.ffn_gate_exps.weight", 4, 4), "has no place in the"),
    "tensor beyond the layers": (
        lambda parts: parts.add_dense("blk.9.attn_norm.weight", 4), "has no place in the model",
    ),
    "bias in one layer only": (
        lambda parts: parts.add_dense("blk.1.attn_q.bias", 256), "is not zero, but|has no place",
    ),
    "rows": (
        lambda parts: parts.resize(K, 64), r"'blk\.0\.attn_k\.weight' has shape \[64, 256\]; the metadata call for",
    ),
    "rows that heads cannot share": (lambda parts: parts.resize(K, 127), "rows, which 2 heads of an even size cannot"),
    "norm": (
        lambda parts: parts.add_dense("output_norm.weight", 255), r"has shape \[255\]; the metadata call for \[256\]",
    ),
    "scale that is not a number": (poisoned(Q), "'blk.0.attn_q.weight' has a scale that is not a finite number"),
    "embedding with such a scale": (poisoned("token_embd.weight"), "'token_embd.weight' has a scale that is not"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(gguf_pair: Callable[[str], GGUFPair], tmp_path: Path, defect: str) -> None:
    change, problem = DEFECTS[defect]
    parts = Parts(gguf_pair("llama-Q8_0").path)
    change(parts)
    path = tmp_path / "defect.gguf"
    parts.write(path)
    with pytest.raises(GGUFError, match=problem) as raised:
        load_model(path, torch.float32, torch.device("cpu"))
    assert str(raised.value).startswith(f"{path}: ")


def test_file_written_again_without_a_change_is_loaded(gguf_pair: Callable[[str], GGUFPair], tmp_path: Path) -> None:
    Parts(gguf_pair("llama-Q8_0").path).write(tmp_path / "same.gguf")
    load_model(tmp_path / "same.gguf", torch.float32, torch.device("cpu"))


def test_progress_counts_up_to_the_bytes_of_all_tensors(gguf_pair: Callable[[str], GGUFPair]) -> None:
    path = gguf_pair("llama-Q8_0").path
    calls: list[tuple[int, int]] = []
    load_model(path, torch.float32, torch.device("cpu"), progress=lambda done, total: calls.append((done, total)))
    with GGUFFile(path) as file:
        total = sum(info.num_bytes for info in file.tensors.values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
