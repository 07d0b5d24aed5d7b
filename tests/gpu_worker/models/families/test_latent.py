"""Latent attention: cached rows of a token, refusals, and a hand-over to another worker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.registry import read_model_config
from kernels.layer_cache import CacheShape
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.latent_cases import CASES
from tests.gpu_worker.models.families.oracle_checks import GREEDY
from tests.gpu_worker.models.families.random_models import save_case


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_token_leaves_one_row_behind(tmp_path: Path) -> None:
    save_case(CASES["deepseek-v3"], tmp_path)
    layout = read_model_config(tmp_path).cache_layout
    assert [layout.shape_of(layer) for layer in range(2)] == [CacheShape(1, 32, 24, is_latent=True)] * 2


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("kv_lora_rank", 520, "attention takes up to 512"),
        ("qk_rope_head_dim", 7, "even number"),
        ("norm_topk_prob", True, "not normalised"),
        ("architectures", ["DeepseekV32ForCausalLM"], "sparse indexer is not supported"),
        ("topk_method", "noaux_tc", "supported: 'greedy'"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, field: str, value: object, problem: str) -> None:
    save_case(replace(CASES["deepseek-v2-lite"]), tmp_path)
    change(tmp_path, **{field: value, **({"head_dim": 7} if field == "qk_rope_head_dim" else {})})
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_another_worker_goes_on_as_the_first_would_have(tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    save_case(CASES[name], tmp_path)

    def answer(emitted: tuple[int, ...]) -> list[int]:
        sequence = make_sequence("0", random_prompt(37, seed=2), GREEDY, emitted)
        return run(make_runner(tmp_path, kv_cache_dtype=kv_cache_dtype), [sequence], token_budget=16).tokens["0"]

    whole = answer(())
    for count in range(1, len(whole)):
        assert answer(tuple(whole[:count])) == whole[count:]
