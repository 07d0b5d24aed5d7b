"""Families against `transformers`: logits in chunks and decodes, and greedy answers of the real engine.

Fields that a configuration leaves out mean what they mean to `transformers`, which is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from gpu_worker.layers.mixture import ExpertLoad
from gpu_worker.models.families import Family, families
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from tests.gpu_worker.models.families import composed_cases, dense_cases, latent_cases, mixture_cases
from tests.gpu_worker.models.families.oracle_checks import (
    assert_answers_are_greedy,
    assert_logits_equal,
    assert_pressure_changes_no_answer,
)
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import oracle_logits, random_tokens

# One of each family that has a mechanism of its own, then other options, and families made of known parts.
FAST = {**dense_cases.CASES, **mixture_cases.CASES, **latent_cases.CASES}
SLOW = {**dense_cases.MORE_CASES, **mixture_cases.MORE_CASES, **latent_cases.MORE_CASES, **composed_cases.CASES}
CASES = {**FAST, **SLOW}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [*FAST, *map(slow, SLOW)])
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *(("gemma3", 0.05), ("cohere2", 0.05), ("glm4", 0.05), slow("nemotron", 0.3), slow("gpt2", 0.3)),
        # Some tokens fall on other experts.
        *(slow(name, 0.3) for name in ("phimoe", "minimax-m2", "afmoe", "opt", "apertus")),
    ],
)
def test_sixteen_bits_stay_near_float32(tmp_path: Path, name: str, tolerance: float) -> None:
    oracle = save_case(replace(CASES[name], dtype=torch.bfloat16), tmp_path)
    run = PagedRun(load_model(tmp_path, torch.bfloat16, CPU), [tokens := random_tokens(20)])
    logits = torch.cat([run.step({0: 19})[0], run.step({0: 1})[0]])
    expected = oracle_logits(oracle, tokens)
    assert (logits - expected).std() / expected.std() < tolerance


EIGHT_BITS = (
    *("ernie-moe", "minimax-m2", "phimoe", "lfm2-moe", "gpt-neox", "hunyuan", "hy-v3", "afmoe", "gpt2", "opt"),
    *("apertus", "mimo-v2", "granite-swa-thetas", "cohere2-moe-options", "mellum-windows", *latent_cases.CASES),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "int8") for name in EIGHT_BITS), *((name, "fp8") for name in latent_cases.CASES)]
)
def test_pressure_changes_no_answer_over_a_cache_of_eight_bits(tmp_path: Path, name: str, dtype: str) -> None:
    save_case(CASES[name], tmp_path)
    assert_pressure_changes_no_answer(tmp_path, kv_cache_dtype=dtype)


def test_tokens_of_experts_are_counted(tmp_path: Path) -> None:
    save_case(CASES["qwen3-moe"], tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    loads = model.expert_loads()
    assert loads is not None
    assert loads.read() == ExpertLoad(tokens=0, imbalance=0.0, unused=7)
    PagedRun(model, [random_tokens(30)]).step({0: 30})
    load = loads.read()
    # The first of the two layers is dense, and a token gets three of the other's seven experts.
    assert load.tokens == 30 * 3
    assert 1 < load.imbalance <= 7 / 3
    assert load.unused < 4


def test_chunks_keep_the_last_tokens_and_layers_without_rotation_all(tmp_path: Path) -> None:
    save_case(CASES["llama4"], tmp_path)
    layout = read_model_config(tmp_path).cache_layout
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (1,)), (11, (0, 2))]


# Classes that serve several kinds of checkpoints, and kinds whose checkpoints are called otherwise.
KINDS = {
    "LlamaForCausalLM": "llama", "DeepseekV3ForCausalLM": "deepseek_v3", "Glm4MoeForCausalLM": "glm4_moe",
    "GPT2LMHeadModel": "gpt2", "InternLM3ForCausalLM": "internlm3", "IQuestCoderForCausalLM": "iquestcoder",
    "Mistral4ForCausalLM": "mistral4", "Llama4ForCausalLM": "llama4_text", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}  # fmt: skip
for table in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES):
    for kind, names in table.items():
        for name in [names] if isinstance(names, str) else names:
            KINDS.setdefault(name, kind)

# A head of drafts is served where the field says that there is one. No field means that nothing ends an answer. The
# last one follows from the heads, in our reader too.
NOT_COMPARED = {"num_nextn_predict_layers", "eos_token_id", "bos_token_id", "architectures", "model_type", "dtype"}
NOT_COMPARED |= {"attention_multiplier"}

# Without which a class of theirs has no model: sizes of heads that divide, and numbers of experts.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6},
}  # fmt: skip


def saved(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as `transformers` reads and saves them."""
    return json.loads(json.dumps(CONFIG_MAPPING[kind].from_dict(dict(fields)).to_dict()))  # type: ignore[no-any-return]


def read(family: Family, fields: Mapping[str, Any]) -> str:
    try:
        return repr(family.read_config(JsonFile(Path("config.json"), {**fields, "architectures": []})))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.architecture)
def test_an_absent_field_means_the_default_of_its_class(family: Family) -> None:
    kind = KINDS[next(name for name in (family.architecture, *family.also) if name in KINDS)]
    whole = saved(kind, {"model_type": kind, **NEEDED.get(kind, {})})
    assert read(family, whole).startswith("ModelConfig(")
    compared = 0
    for name in whole.keys() - NOT_COMPARED:
        fields = {field: value for field, value in whole.items() if field != name}
        ours = read(family, fields)
        if "is missing" not in ours:
            compared += 1
            assert ours == read(family, saved(kind, fields)), name
    assert compared > 8


@pytest.mark.parametrize("kind", ["ernie4_5", "seed_oss", "internlm3", "iquestcoder", "llama", "mistral"])
def test_a_null_size_of_heads_means_what_it_means_to_its_class(kind: str) -> None:
    (family,) = (own for own in families() if kind in (KINDS.get(name) for name in (own.architecture, *own.also)))
    fields = {"model_type": kind, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    theirs = saved(kind, {**fields, "head_dim": None})
    assert theirs["head_dim"] == 64
    assert read(family, {**theirs, "head_dim": None}) == read(family, theirs)
