"""Fields that a configuration leaves out mean what they mean to `transformers`, which is the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.families import Family, families
from gpu_worker.models.json_file import JsonFile

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
