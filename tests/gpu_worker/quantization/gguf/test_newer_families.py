"""Logits of GGUF files of hybrids and of Gemma 4 against `transformers` with the numbers that the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.errors import GGUFError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, run
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.converted import FALCON, GEMMA4, LFM2
from tests.gpu_worker.quantization.gguf.gguf_models import VOCAB_SIZE
from tests.gpu_worker.quantization.gguf.newer_files import NewerFile, write_newer
from tests.gpu_worker.quantization.gguf.test_defects import Parts
from tests.gpu_worker.quantization.gguf.written_file import assert_file_equals

_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_SMALL = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 3}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
_FALCON = {
    **FALCON,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

FILES = {
    "qwen3next": NewerFile("qwen3next", "Qwen3Next", {**_DELTA, **_EXPERTS}),
    "qwen3next-fused": NewerFile("qwen3next", "Qwen3Next", {**_DELTA, **_EXPERTS}, fuses_inputs=True),
    "qwen35": NewerFile("qwen35", "Qwen3_5Text", _DELTA, "Qwen3_5"),
    "qwen35-equal": NewerFile("qwen35", "Qwen3_5Text", {**_DELTA, "linear_num_value_heads": 2}, "Qwen3_5"),
    "qwen35moe": NewerFile("qwen35moe", "Qwen3_5MoeText", {**_DELTA, **_EXPERTS}, "Qwen3_5Moe"),
    "gemma4": NewerFile("gemma4", "Gemma4Text", GEMMA4, "Gemma4"),
    "gemma4-shared": NewerFile("gemma4", "Gemma4Text", {**GEMMA4, **_SMALL, "use_double_wide_mlp": True}, "Gemma4"),
    "gemma4-experts": NewerFile(
        "gemma4",
        "Gemma4Text",
        {**GEMMA4, **_GEMMA4_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "Gemma4",
    ),
    "falcon-h1": NewerFile("falcon-h1", "FalconH1", {**_FALCON, "mamba_rms_norm": True}),
    "falcon-h1-plain": NewerFile(
        "falcon-h1",
        "FalconH1",
        {**_FALCON, "mamba_rms_norm": False, "mamba_conv_bias": False, "projectors_bias": True, "mlp_bias": True},
    ),
    "lfm2": NewerFile("lfm2", "Lfm2", LFM2),
    "lfm2moe": NewerFile(
        "lfm2moe",
        "Lfm2Moe",
        {**LFM2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
}
SLOW = [pytest.param(name, marks=[] if name in ("qwen35", "gemma4") else [pytest.mark.slow]) for name in FILES]


@pytest.mark.parametrize("name", SLOW)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_newer(path, FILES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logits_of_quantized_files_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_newer(path, replace(FILES[name], kind="Q8_0")))


@pytest.mark.slow
def test_value_heads_smaller_than_blocks_are_put_in_order(tmp_path: Path) -> None:
    options = {**_DELTA, "linear_num_value_heads": 8, "linear_value_head_dim": 16}
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_newer(path, NewerFile("qwen35", "Qwen3_5Text", options, "Qwen3_5")))
    mixer = read_model_config(path).layers[0].mixer
    assert isinstance(mixer, GatedDeltaShape)
    assert mixer.values_by_turns


def test_rotation_by_other_divisors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_newer(path, FILES["gemma4"])
    stored = gguf.GGUFReader(path, "r+")
    divisors = next(tensor for tensor in stored.tensors if tensor.name == "rope_freqs.weight")
    divisors.data[:] = np.array([2.0] * len(divisors.data), np.float32)
    del stored, divisors
    with pytest.raises(GGUFError, match=r"'rope_freqs\.weight'.* other numbers than ones"):
        read_model_config(path)


@pytest.mark.parametrize("name", ["qwen35", "falcon-h1"])
def test_states_that_make_no_whole_heads_are_refused_by_field(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_newer(path, FILES[name])
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
    oracle = write_newer(path, FILES[name])
    prompt = list(range(3, 24))
    runner = make_runner(path, max_model_len=48, dtype="float32")
    answer = run(runner, [make_sequence("0", prompt, Sampling(temperature=0.0, max_tokens=9))]).tokens["0"]
    expected = oracle_logits(oracle, torch.tensor([*prompt, *answer]))[len(prompt) - 1 : -1]
    assert answer == expected.argmax(1).tolist()


@pytest.mark.slow
def test_file_of_which_no_layer_attends_is_refused_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_newer(path, FILES["lfm2"])
    parts = Parts(path)
    parts.fields["lfm2.block_count"] = 1
    parts.write(path)
    with pytest.raises(GGUFError, match=r"'lfm2.block_count' is 1, and none of these layers attends"):
        read_model_config(path)
