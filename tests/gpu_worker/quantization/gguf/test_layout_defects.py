"""Metadata in the layouts of `layout_files`: what cannot be served is refused, with the field and what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.quantization.gguf.errors import GGUFError
from tests.gpu_worker.quantization.gguf.family_files import write_family
from tests.gpu_worker.quantization.gguf.layout_files import write_layout
from tests.gpu_worker.quantization.gguf.llama_cpp_cases import CASES
from tests.gpu_worker.quantization.gguf.test_defects import Change, Parts, field, without
from tests.gpu_worker.quantization.gguf.test_families import FILES
from tests.gpu_worker.quantization.gguf.written_file import once_each

DEFECTS: dict[str, tuple[str, Change, str]] = {
    "growth without a length": (
        "ministral3",
        without("mistral3.rope.scaling.original_context_length"),
        "'mistral3.rope.scaling.original_context_length' is missing",
    ),
    "a growth for each of several layers": (
        "ministral3",
        field("mistral3.rope.scaling.yarn_log_multiplier", [1.0, 1.0]),
        "'mistral3.rope.scaling.yarn_log_multiplier' is an array of 2; it must be a number above 0",
    ),
    "no addend": (
        "arcee",
        without("arcee.attention.layer_norm_rms_epsilon"),
        "'arcee.attention.layer_norm_rms_epsilon' is missing",
    ),
    "states that are no multiple of the stream": (
        "mamba2",
        field("mamba2.embedding_length", 47),
        r"'mamba2.ssm.inner_size' is 96; it must be a multiple of mamba2.embedding_length \(47\)",
    ),
    "key heads of fewer layers": (
        "nemotron_h_moe",
        field("nemotron_h_moe.attention.head_count_kv", [0, 0, 2]),
        "'nemotron_h_moe.attention.head_count_kv' has 3 numbers; it must have 5, none of them below 0",
    ),
    "infinitely many key heads": (
        "arcee",
        field("arcee.attention.head_count_kv", [float("inf")] * 2),
        "'arcee.attention.head_count_kv' is an array of 2; it must be a whole number",
    ),
    "experts of several sizes": (
        "nemotron_h_moe",
        field("nemotron_h_moe.expert_feed_forward_length", [0, 24, 0, 32, 0]),
        "'nemotron_h_moe.expert_feed_forward_length' is an array of 5; it must be a whole number",
    ),
    "experts without the shared one": (
        "nemotron_h_moe",
        lambda parts: [parts.tensors.pop(f"blk.{layer}.ffn_up_shexp.weight") for layer in (1, 3)],
        "'ffn_up_shexp.weight'.* is missing in all layers",
    ),
}


@pytest.fixture(scope="module")
def layout_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return once_each(tmp_path_factory, lambda path, name: write_layout(path, CASES[name]))


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(layout_file: Callable[[str], Path], tmp_path: Path, defect: str) -> None:
    name, change, problem = DEFECTS[defect]
    parts = Parts(layout_file(name))
    change(parts)
    parts.write(tmp_path / "defect.gguf")
    with pytest.raises(GGUFError, match=problem):
        read_gguf_config(tmp_path / "defect.gguf")


def test_layers_of_llama_4_that_all_rotate_see_everything(layout_file: Callable[[str], Path], tmp_path: Path) -> None:
    """Zero as the size of windows is how converters say it."""
    parts = Parts(layout_file("llama4"))
    parts.fields["llama4.attention.sliding_window"] = 0
    parts.write(tmp_path / "plain.gguf")
    shapes = [read_gguf_config(tmp_path / "plain.gguf").attention_shape(layer) for layer in range(5)]
    assert [(shape.rotary, shape.chunk_size) for shape in shapes] == [(0, None)] * 5
    shapes = [read_gguf_config(layout_file("llama4")).attention_shape(layer) for layer in range(5)]
    assert [shape.rotary for shape in shapes] == [0, 0, 0, None, 0]
    assert [shape.chunk_size for shape in shapes] == [8192, 8192, 8192, None, 8192]


def test_latent_attention_with_growing_queries_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "model.gguf", FILES["deepseek2"])
    parts = Parts(tmp_path / "model.gguf")
    parts.fields["deepseek2.attention.temperature_scale"] = 0.1
    parts.write(tmp_path / "growing.gguf")
    with pytest.raises(GGUFError, match=r"'deepseek2.attention.temperature_scale' is set; latent attention"):
        read_gguf_config(tmp_path / "growing.gguf")


def test_number_of_key_heads_may_be_given_for_each_layer(layout_file: Callable[[str], Path], tmp_path: Path) -> None:
    """As of Granite's hybrids that have attention alone."""
    parts = Parts(layout_file("arcee"))
    parts.fields["arcee.attention.head_count_kv"] = np.array([2, 2])
    parts.write(tmp_path / "listed.gguf")
    assert read_gguf_config(tmp_path / "listed.gguf") == read_gguf_config(layout_file("arcee"))
