"""Metadata of more families' GGUF files: what cannot be served is refused, with the field and what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.quantization.gguf.errors import GGUFError
from tests.gpu_worker.quantization.gguf.family_files import write_family
from tests.gpu_worker.quantization.gguf.test_defects import Change, Parts, field, without
from tests.gpu_worker.quantization.gguf.test_families import FILES
from tests.gpu_worker.quantization.gguf.written_file import once_each

DEFECTS: dict[str, tuple[str, Change, str]] = {
    "window of a family without": (
        "glm4moe",
        field("glm4moe.attention.sliding_window", 8),
        "'glm4moe.attention.sliding_window' is set; supported: in files of architecture llama, gpt-oss, gemma2",
    ),
    "half of the heads rotated": ("gemma", field("gemma.rope.dimension_count", 8), "supported: the size of a key, 16"),
    "odd rotation": ("glm4moe", field("glm4moe.rope.dimension_count", 7), "must be an even number up to the size of"),
    "one set of divisors": (
        "phi3-longrope",
        without("rope_factors_short.weight"),
        "'rope_factors_short.weight': is missing|'rope_factors_short.weight' is missing",
    ),
    "divisors of another size": (
        "phi3-longrope",
        lambda parts: parts.add_dense("rope_factors_long.weight", 5),
        r"'rope_factors_long.weight' is F32 of shape \[5\]; it must be F32 of shape \[6\]",
    ),
    "granite that does not rotate": ("granite", field("granite.rope.scaling.finetuned", False), "whose layers rotate"),
    "scores of another kind": (
        "glm4moe",
        field("glm4moe.expert_gating_func", 3),
        r"'glm4moe.expert_gating_func' is 3; supported: 1 \(softmax\) and 2 \(sigmoid\)",
    ),
    "experts that are not counted": (
        "glm4moe",
        without("glm4moe.expert_count"),
        "'glm4moe.expert_count' is missing or 0, but layers have routers",
    ),
    "groups that do not divide": ("deepseek2-v3", field("deepseek2.expert_group_count", 3), "must divide deepseek2"),
    "groups that hold too few": (
        "deepseek2-v3",
        field("deepseek2.expert_group_used_count", 1),
        "is 1 of 4 groups; they must hold the 3 experts",
    ),
    "only layers that draft": ("glm4moe", field("glm4moe.nextn_predict_layers", 3), "whole number from 0 to 2"),
    "latent vectors too large": ("deepseek2", field("deepseek2.attention.kv_lora_rank", 513), "from 1 to 512"),
    "keys smaller than their rotation": (
        "deepseek2",
        field("deepseek2.attention.key_length_mla", 16),
        r"is 16; it must be above deepseek2.rope.dimension_count \(16\)",
    ),
    "yarn of an old converter": (
        "deepseek2",
        without("deepseek2.rope.scaling.yarn_log_multiplier"),
        "'deepseek2.rope.scaling.yarn_log_multiplier' is missing",
    ),
    "base of the windows' rotation": ("gemma3", field("gemma3.rope.freq_base_swa", 0.5), "it must be above 1"),
    "pattern of fewer layers": (
        "olmo3",
        field("olmo2.attention.sliding_window_pattern", [1, 0]),
        "must be an array of 5 finite numbers",
    ),
}


@pytest.fixture(scope="module")
def family_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return once_each(tmp_path_factory, lambda path, name: write_family(path, FILES[name]))


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
