"""Metadata of more families' GGUF files: what cannot be served is refused, with the field and what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from tests.gpu_worker.quantization.gguf.family_files import CASES, write_family
from tests.gpu_worker.quantization.gguf.test_defects import Change, Parts, field, without
from tests.gpu_worker.quantization.gguf.test_families import FILES
from tests.gpu_worker.quantization.gguf.written_file import once_each

DEFECTS: dict[str, tuple[str, Change, str]] = {
    "window of a family without": (
        "glm4moe", field("glm4moe.attention.sliding_window", 8),
        "'glm4moe.attention.sliding_window' is set; supported: in files of architecture llama, gpt-oss, gemma2",
    ),
    "half of the heads rotated": ("gemma", field("gemma.rope.dimension_count", 8), "supported: the size of a key, 16"),
    "odd rotation": ("glm4moe", field("glm4moe.rope.dimension_count", 7), "must be an even number up to the size of"),
    "one set of divisors": (
        "phi3-longrope", without("rope_factors_short.weight"),
        "'rope_factors_short.weight': is missing|'rope_factors_short.weight' is missing",
    ),
    "divisors of another size": (
        "phi3-longrope", lambda parts: parts.add_dense("rope_factors_long.weight", 5),
        r"'rope_factors_long.weight' is F32 of shape \[5\]; it must be F32 of shape \[6\]",
    ),
    "granite that does not rotate": ("granite", field("granite.rope.scaling.finetuned", False), "whose layers rotate"),
    "scores of another kind": (
        "glm4moe", field("glm4moe.expert_gating_func", 3),
        r"'glm4moe.expert_gating_func' is 3; supported: 1 \(softmax\) and 2 \(sigmoid\)",
    ),
    "experts that are not counted": (
        "glm4moe", without("glm4moe.expert_count"), "'glm4moe.expert_count' is missing or 0, but layers have routers",
    ),
    "groups that do not divide": ("deepseek2-v3", field("deepseek2.expert_group_count", 3), "must divide deepseek2"),
    "groups that hold too few": (
        "deepseek2-v3", field("deepseek2.expert_group_used_count", 1), "is 1 of 4 groups; they must hold the 3 experts",
    ),
    "only layers that draft": ("glm4moe", field("glm4moe.nextn_predict_layers", 3), "whole number from 0 to 2"),
    "latent vectors too large": ("deepseek2", field("deepseek2.attention.kv_lora_rank", 513), "from 1 to 512"),
    "keys smaller than their rotation": (
        "deepseek2", field("deepseek2.attention.key_length_mla", 16),
        r"is 16; it must be above deepseek2.rope.dimension_count \(16\)",
    ),
    "yarn of an old converter": (
        "deepseek2", without("deepseek2.rope.scaling.yarn_log_multiplier"),
        "'deepseek2.rope.scaling.yarn_log_multiplier' is missing",
    ),
    "base of the windows' rotation": ("gemma3", field("gemma3.rope.freq_base_swa", 0.5), "it must be above 1"),
    "pattern of fewer layers": (
        "olmo3", field("olmo2.attention.sliding_window_pattern", [1, 0]), "must be an array of 5 finite numbers",
    ),
    "latent attention with growing queries": (
        "deepseek2", field("deepseek2.attention.temperature_scale", 0.1),
        r"'deepseek2.attention.temperature_scale' is set; latent attention",
    ),
    "amplitude of another model's yarn": (
        "qwen2-yarn", field("qwen2.rope.scaling.yarn_log_multiplier", 0.5), "yarn_log_multiplier' is set, which is not",
    ),
    "growth without a length": (
        "ministral3", without("mistral3.rope.scaling.original_context_length"),
        "'mistral3.rope.scaling.original_context_length' is missing",
    ),
    "a growth for each of several layers": (
        "ministral3", field("mistral3.rope.scaling.yarn_log_multiplier", [1.0, 1.0]),
        "'mistral3.rope.scaling.yarn_log_multiplier' is an array of 2; it must be a number above 0",
    ),
    "no addend": (
        "arcee", without("arcee.attention.layer_norm_rms_epsilon"),
        "'arcee.attention.layer_norm_rms_epsilon' is missing",
    ),
    "states that are no multiple of the stream": (
        "mamba2", field("mamba2.embedding_length", 47),
        r"'mamba2.ssm.inner_size' is 96; it must be a multiple of mamba2.embedding_length \(47\)",
    ),
    "key heads of fewer layers": (
        "nemotron_h_moe", field("nemotron_h_moe.attention.head_count_kv", [0, 0, 2]),
        "'nemotron_h_moe.attention.head_count_kv' has 3 numbers; it must have 5, none of them below 0",
    ),
    "infinitely many key heads": (
        "arcee", field("arcee.attention.head_count_kv", [float("inf")] * 2),
        "'arcee.attention.head_count_kv' is an array of 2; it must be a whole number",
    ),
    "experts of several sizes": (
        "nemotron_h_moe", field("nemotron_h_moe.expert_feed_forward_length", [0, 24, 0, 32, 0]),
        "'nemotron_h_moe.expert_feed_forward_length' is an array of 5; it must be a whole number",
    ),
    "experts without the shared one": (
        "nemotron_h_moe", lambda parts: [parts.tensors.pop(f"blk.{layer}.ffn_up_shexp.weight") for layer in (1, 3)],
        "'ffn_up_shexp.weight'.* is missing in all layers",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def family_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return once_each(tmp_path_factory, lambda path, name: write_family(path, {**CASES, **FILES}[name]))


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_named(family_file: Callable[[str], Path], tmp_path: Path, defect: str) -> None:
    name, change, problem = DEFECTS[defect]
    parts = Parts(family_file(name))
    change(parts)
    parts.write(tmp_path / "defect.gguf")
    with pytest.raises(GGUFError, match=problem):
        read_gguf_config(tmp_path / "defect.gguf")


@pytest.mark.parametrize(("written", "read"), [(2.5, 2.5), (0.0, None)])
def test_bound_of_queries_and_keys_is_read(
    family_file: Callable[[str], Path], tmp_path: Path, written: float, read: float | None
) -> None:
    parts = Parts(family_file("olmo2"))
    parts.fields["olmo2.attention.clamp_kqv"] = written
    parts.write(tmp_path / "bounded.gguf")
    assert read_gguf_config(tmp_path / "bounded.gguf").attention_shape(0).qkv_clip == read


@pytest.mark.parametrize(
    ("name", "num_layers", "hidden_size", "scalar"), [("gemma2", 46, 4608, 144), ("gemma3", 62, 5376, 168)]
)
def test_scale_of_the_largest_gemma_is_that_of_its_configuration(
    family_file: Callable[[str], Path], tmp_path: Path, name: str, num_layers: int, hidden_size: int, scalar: int
) -> None:
    """`query_pre_attn_scalar` of the published 27B models, whose heads have 128 dimensions."""
    parts = Parts(family_file(name))
    sizes = {"block_count": num_layers, "embedding_length": hidden_size, "attention.head_count": 32}
    heads = {"attention.head_count_kv": 16, "attention.key_length": 128, "attention.value_length": 128}
    parts.fields |= {f"{name}.{key}": value for key, value in {**sizes, **heads, "rope.dimension_count": 128}.items()}
    parts.write(tmp_path / "large.gguf")
    config = read_gguf_config(tmp_path / "large.gguf")
    assert config.attention_shape(0).scale == pytest.approx(scalar**-0.5)
    assert read_gguf_config(family_file(name)).attention_shape(0).scale is None


def test_layers_of_llama_4_that_all_rotate_see_everything(family_file: Callable[[str], Path], tmp_path: Path) -> None:
    """Zero as the size of windows is how converters say it."""
    parts = Parts(family_file("llama4"))
    parts.fields["llama4.attention.sliding_window"] = 0
    parts.write(tmp_path / "plain.gguf")
    shapes = [read_gguf_config(tmp_path / "plain.gguf").attention_shape(layer) for layer in range(5)]
    assert [(shape.rotary, shape.chunk_size) for shape in shapes] == [(0, None)] * 5
    shapes = [read_gguf_config(family_file("llama4")).attention_shape(layer) for layer in range(5)]
    assert [shape.rotary for shape in shapes] == [0, 0, 0, None, 0]
    assert [shape.chunk_size for shape in shapes] == [8192, 8192, 8192, None, 8192]


def test_number_of_key_heads_may_be_given_for_each_layer(family_file: Callable[[str], Path], tmp_path: Path) -> None:
    """As of Granite's hybrids that have attention alone."""
    parts = Parts(family_file("arcee"))
    parts.fields["arcee.attention.head_count_kv"] = np.array([2, 2])
    parts.write(tmp_path / "listed.gguf")
    assert read_gguf_config(tmp_path / "listed.gguf") == read_gguf_config(family_file("arcee"))
