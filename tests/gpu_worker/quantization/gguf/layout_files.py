"""The files that llama.cpp's converter makes of small random models, written by formula with the `gguf` package.

`test_llama_cpp_files` shows that the converter writes what is read; these need only the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.gpu_worker.quantization.gguf.converted import Converted, random_model
from tests.gpu_worker.quantization.gguf.converted_dense import DENSE
from tests.gpu_worker.quantization.gguf.converted_hybrids import HYBRIDS
from tests.gpu_worker.quantization.gguf.converted_mixtures import MIXTURES
from tests.gpu_worker.quantization.gguf.layout_fields import add_fields
from tests.gpu_worker.quantization.gguf.written_file import names_of, written

Array = npt.NDArray[np.float32]
Parts = Iterator[tuple[str, Array]]

# A checkpoint of every family that GGUF files are read of, for llama.cpp's own converter.
CASES: Mapping[str, Converted] = MappingProxyType({**DENSE, **MIXTURES, **HYBRIDS})

# Architectures whose queries and keys are reordered for a rotation of neighbours.
_NEIGHBOURS = ("arcee", "mistral3", "granitehybrid")
_MAMBA = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def write_layout(path: Path, case: Converted) -> Any:
    """Write a random model in float32, and return it."""
    oracle = random_model(case)
    config = oracle.config
    stored = names_of(case.architecture, config.num_hidden_layers)
    biases = [(name, buffer) for name, buffer in oracle.named_buffers() if name.endswith("correction_bias")]
    with written(path, case.architecture) as writer:
        add_fields(writer, config, case)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
        writer.add_token_merges([])
        for name, tensor in [*oracle.named_parameters(), *biases]:
            for own, array in _transformed(name, tensor.detach().float().numpy(), config, case):
                writer.add_tensor(stored(own), np.ascontiguousarray(array))
    return oracle


def _transformed(name: str, array: Array, config: Any, case: Converted) -> Parts:
    """Return a tensor as its family's converter writes it, under names that the package's table knows."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    if case.architecture.startswith(("nemotron_h", "mamba2")):
        name = name.replace("model.", "backbone.", 1)
    if name.endswith("e_score_correction_bias"):
        yield f"{layer}exp_probs_b.bias", array
    elif ".experts." in name:
        yield from _experts(name, layer, array, case)
    elif "shared_mlp." in name and "_linear" in name:
        yield from _granite_shared(name, layer, array, config)
    elif parts[-1] in _MAMBA or ".conv1d." in name or name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        yield from _mamba(name, layer, array, config)
    else:
        if case.architecture == "nemotron" and name.endswith("norm.weight"):
            array = array + 1
        if parts[-2] in ("q_proj", "k_proj") and case.architecture in _NEIGHBOURS:
            array = _by_neighbours(array, config.num_attention_heads, config.num_key_value_heads, parts[-2])
        if "query_key_value" in name:
            array = _by_kind(array, config.num_attention_heads)
        yield name.replace(".router.weight", ".router.layer.weight") if "sparse" in name else name, array


def _by_neighbours(array: Array, num_heads: int, num_kv_heads: int, part: str) -> Array:
    halves = array.reshape(num_heads if part == "q_proj" else num_kv_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _by_kind(array: Array, num_heads: int) -> Array:
    """Put all queries before all keys before all values, which lie by heads."""
    return array.reshape(num_heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _experts(name: str, layer: str, array: Array, case: Converted) -> Parts:
    """Write gates and up projections apart; Llama 4's checkpoints have all matrices transposed."""
    if case.architecture == "llama4":
        array = array.swapaxes(1, 2)
    if "gate_up_proj" in name:
        gate, up = np.split(array, 2, axis=1)
        yield f"{layer}ffn_gate_exps.weight", gate
        yield f"{layer}ffn_up_exps.weight", up
    else:
        yield f"{layer}ffn_{'down' if 'down_proj' in name else 'up'}_exps.weight", array


def _granite_shared(name: str, layer: str, array: Array, config: Any) -> Parts:
    end = "_shexp" if config.num_local_experts else ""
    if "output_linear" in name:
        yield f"{layer}ffn_down{end}.weight", array
        return
    gate, up = np.split(array, 2)
    yield f"{layer}ffn_gate{end}.weight", gate
    yield f"{layer}ffn_up{end}.weight", up


def _mamba(name: str, layer: str, array: Array, config: Any) -> Parts:
    """Return a tensor of a mixer: rates are negative, vectors of heads and of groups have rows."""
    part = name.split(".")[-1]
    if part == "A_log":
        array = -np.exp(array)
    if part in ("A_log", "D"):
        array = array[:, None]
    if part in _MAMBA:
        yield f"{layer}{_MAMBA[part]}", array
    elif ".conv1d." in name:
        yield f"{layer}ssm_conv1d.{part}", array.squeeze()
    else:
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        yield f"{layer}ssm_norm.weight", array.reshape(groups, -1)
