"""Logits of GGUF files of all families against `transformers` with the numbers that the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, run
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.converted import YARN, Converted
from tests.gpu_worker.quantization.gguf.family_files import CASES, WHOLE_BLOCKS, write_family
from tests.gpu_worker.quantization.gguf.test_defects import Parts
from tests.gpu_worker.quantization.gguf.written_file import VOCAB_SIZE, assert_file_equals

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.2],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
_EXPERTS = {"moe_intermediate_size": 32}
_LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_DELTA_EXPERTS = {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64}
_FALCON = {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16}


def whole(name: str, **options: Any) -> Converted:
    """Return a case of the converter with rows of whole blocks, which can be quantized."""
    return replace(CASES[name], options={**WHOLE_BLOCKS, **CASES[name].options, **options})


FILES = {
    **{name: whole(name) for name in ("gemma2", "gemma3", "phi3", "olmo2", "olmo3", "exaone4", "cohere2")},
    **{name: whole(name) for name in ("granite", "granitemoe", "smollm3", "starcoder2", "glm4", "seed_oss", "gemma4")},
    "gemma": whole("gemma", head_dim=16),
    "phi3-window": whole("phi3", sliding_window=8),
    "phi3-longrope": whole("phi3-longrope", rope_parameters=_LONG),
    "glm4moe": replace(whole("glm4moe", **_EXPERTS), num_drafting=1),
    "deepseek2": whole("deepseek2-yarn", **_EXPERTS, q_lora_rank=None),
    "deepseek2-whole": replace(whole("deepseek2-yarn", **_EXPERTS, q_lora_rank=64), whole_up=True),
    "deepseek2-v3": whole("deepseek-v3", **_EXPERTS, q_lora_rank=64, rope_parameters=_LATENT_YARN),
    "granitemoe-shared": whole("granitemoe-shared", shared_intermediate_size=32),
    "qwen3next": whole("qwen3next", **_DELTA_EXPERTS),
    "qwen3next-fused": replace(whole("qwen3next", **_DELTA_EXPERTS), fuses_inputs=True),
    "qwen35": whole("qwen35", **_DELTA),
    "qwen35-equal": whole("qwen35", **_DELTA, linear_num_value_heads=2),
    "qwen35moe": whole("qwen35moe", **_DELTA_EXPERTS),
    "gemma4-shared": whole("gemma4-shared", hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCAB_SIZE),
    "gemma4-experts": whole("gemma4-experts", **_EXPERTS),
    "falcon-h1": whole("falcon-h1", **_FALCON),
    "falcon-h1-plain": whole(
        "falcon-h1", **_FALCON, mamba_rms_norm=False, mamba_conv_bias=False, projectors_bias=True, mlp_bias=True
    ),
    "lfm2": whole("lfm2"),
    "lfm2moe": whole("lfm2moe", **_EXPERTS),
}
_SLOW = (
    *("qwen3next", "qwen3next-fused", "qwen35-equal", "qwen35moe", "gemma4-shared", "gemma4-experts", "lfm2moe"),
    *("falcon-h1", "falcon-h1-plain", "lfm2"),
)
# Cases of llama.cpp's converter as they are.
LAYOUTS = (
    *("arcee", "ministral3", "ernie4_5-moe", "dots1", "hunyuan-dense", "hunyuan-moe", "minimax-m2", "command-r"),
    "command-r-plus",
    *("chatglm", "nemotron", "phi2", "gptneox", "stablelm", "llama4", "granitehybrid", "mamba2", "nemotron_h_moe"),
)
# Other options of these, and what takes longest.
MORE_LAYOUTS = (
    *("ernie4_5", "exaone-moe", "gptneox-serial", "stablelm-parallel", "granitehybrid-dense", "bamba", "nemotron_h"),
)


def slow(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", [*(name for name in FILES if name not in _SLOW), *slow(_SLOW)])
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, FILES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logits_of_quantized_files_equal_transformers(tmp_path: Path, name: str) -> None:
    options = {"hidden_size": 128} if name == "gemma" else {}
    case = replace(FILES[name], kind="Q8_0", options={**FILES[name].options, **options})
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, case))


@pytest.mark.parametrize("name", [*LAYOUTS, *slow(MORE_LAYOUTS)])
def test_logits_of_converted_layouts_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, CASES[name]), (23, 16, 1))


@pytest.mark.slow
def test_value_heads_smaller_than_blocks_are_put_in_order(tmp_path: Path) -> None:
    case = whole("qwen35", linear_num_value_heads=8, linear_value_head_dim=16, linear_key_head_dim=32)
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_family(path, case))
    mixer = read_model_config(path).layers[0].mixer
    assert isinstance(mixer, GatedDeltaShape)
    assert mixer.values_by_turns


def test_rotation_by_other_divisors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_family(path, FILES["gemma4"])
    stored = gguf.GGUFReader(path, "r+")
    divisors = next(tensor for tensor in stored.tensors if tensor.name == "rope_freqs.weight")
    divisors.data[:] = np.array([2.0] * len(divisors.data), np.float32)
    del stored, divisors
    with pytest.raises(GGUFError, match=r"'rope_freqs\.weight'.* other numbers than ones"):
        read_model_config(path)


@pytest.mark.parametrize("name", ["qwen35", "falcon-h1"])
def test_states_that_make_no_whole_heads_are_refused_by_field(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_family(path, FILES[name])
    stored = gguf.GGUFReader(path, "r+")
    size = stored.fields[f"{name}.ssm.inner_size"]
    size.parts[-1][0] += 1
    inner = int(size.parts[-1][0])
    del stored, size
    with pytest.raises(GGUFError, match=rf"'{name}\.ssm\.inner_size' is {inner}; it must be a multiple of {name}\.ssm"):
        read_model_config(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "gemma4-shared", "lfm2moe"])
def test_files_are_served(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_family(path, FILES[name])
    prompt = list(range(3, 24))
    runner = make_runner(path, max_model_len=48, dtype="float32")
    answer = run(runner, [make_sequence("0", prompt, Sampling(temperature=0.0, max_tokens=9))]).tokens["0"]
    expected = oracle_logits(oracle, torch.tensor([*prompt, *answer]))[len(prompt) - 1 : -1]
    assert answer == expected.argmax(1).tolist()


@pytest.mark.slow
def test_file_of_which_no_layer_attends_is_refused_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_family(path, FILES["lfm2"])
    parts = Parts(path)
    parts.fields["lfm2.block_count"] = 1
    parts.write(path)
    with pytest.raises(GGUFError, match=r"'lfm2.block_count' is 1, and none of these layers attends"):
        read_model_config(path)
