"""Reading the configurations of models with recurrent layers, and refusing those that cannot be served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape
from gpu_worker.layers.mamba2 import OutputNorm
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.recurrent_config import read_mamba2
from gpu_worker.models.support_page import sample_config

FALCON, MAMBA2, NEMOTRON = "FalconH1ForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"
SIZES = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_state": 64}


def file_of(**fields: Any) -> JsonFile:
    return JsonFile(Path("config.json"), {**SIZES, **fields})


def test_heads_divide_the_inner_size() -> None:
    assert read_mamba2(file_of(mamba_d_head="auto")).sizes.head_dim == 64
    assert read_mamba2(file_of(mamba_expand=4)).sizes.head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_d_head": 32}, "'mamba_d_head' times mamba_n_heads is 32 . 8; it must be the inner size, 512"),
        ({"mamba_n_groups": 3}, "'mamba_n_groups' is 3; it must divide mamba_n_heads .8."),
        ({"mamba_d_state": 257}, "'mamba_d_state' is 257; it must be a whole number from 1 to 256"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; the convolutions of Mamba-2 are served with 'silu'"),
        ({"time_step_limit": [0.5, 0.1]}, r"'time_step_limit' is \[0.5, 0.1\]; it must be two numbers"),
        ({"time_step_limit": [0.5]}, "must be two numbers"),
        ({"time_step_limit": ["a", 1]}, "must be two numbers"),
    ],
)
def test_mixer_that_cannot_be_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_mamba2(file_of(**fields))


@pytest.mark.parametrize("end", [math.inf, {"__float__": "Infinity"}], ids=str)
def test_bound_of_steps_may_be_infinite(end: object) -> None:
    assert read_mamba2(file_of(time_step_limit=[0.001, end])).step_limits == (0.001, math.inf)
    assert read_mamba2(file_of()).step_limits == (0.0, math.inf)


def test_factors_of_falcon_go_where_they_cost_nothing() -> None:
    fields = {"attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5, "key_multiplier": 0.5}
    fields |= {"ssm_in_multiplier": 3.0, "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0]}
    mixer = sample_config(FALCON, **fields).layer(0).mixer
    assert isinstance(mixer, AttentionBesideMamba2Shape)
    assert (mixer.attention.scale, mixer.attention.output_scale) == (2 * 32**-0.5, 1.0)
    assert mixer.mamba2.input_scales == (3.0, 6.0, 9.0, 12.0, 15.0)
    assert mixer.mamba2.norm is OutputNorm.NONE


def test_layers_of_nemotron_are_letters_or_names() -> None:
    by_letter = sample_config(NEMOTRON, hybrid_override_pattern="M*-")
    by_name = sample_config(NEMOTRON, layers_block_type=["mamba", "attention", "mlp"])
    assert by_letter == by_name
    assert [(layer.mixer is None, layer.feed_forward is None) for layer in by_letter.layers] == [
        (False, True),
        (False, True),
        (True, False),
    ]


def test_granite_rotates_where_it_says_so() -> None:
    for kind, rotary in (("rope", 0), ("nope", None), (None, None)):
        shape = sample_config("GraniteMoeHybridForCausalLM", position_embedding_type=kind).layer(7).mixer
        assert isinstance(shape, AttentionShape)
        assert shape.rotary == rotary


def test_mamba2_has_no_attention_and_a_bound_of_its_own() -> None:
    attention = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
    config = sample_config(MAMBA2, max_position_embeddings=None, **attention)
    assert config.has_states
    assert config.max_model_len == 8192
    assert (config.ropes, config.num_heads, config.num_kv_heads, config.head_dim) == ((), 0, 0, 0)
    assert config.intermediate_size == 0


def test_block_of_nemotron_has_a_size_where_there_is_one() -> None:
    assert sample_config(NEMOTRON, hybrid_override_pattern="M*", intermediate_size=None).intermediate_size == 0
