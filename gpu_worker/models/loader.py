"""Opens a model's weights, in whichever format, says what memory they need, and loads a model that is ready to run."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer_source import QuantizedLayers
from gpu_worker.layers.rope_scaling import note_on_length
from gpu_worker.models.checkpoint import Checkpoint, Progress
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.checkpoint import GGUFCheckpoint
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.quantization.quantization_method import KeepsHalf
from kernels.linear import LinearFactory
from kernels.linear.dense import keeps_half

StoredWeights = Checkpoint | GGUFCheckpoint


def open_weights(
    model: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    keeps_half: KeepsHalf | None = None,
    names: TensorNames | None = None,
) -> StoredWeights:
    """Open the weights of a model, a context manager; arguments as of `Checkpoint`. `names` defaults to Llama's."""
    gguf = find_gguf(model)
    if gguf is not None:
        return GGUFCheckpoint(gguf, dtype, device, progress, keeps_half=keeps_half)
    renamed, unused = ((), ()) if names is None else (names.renamed, names.unused)
    return Checkpoint(
        model, dtype, device, progress, keeps_half=keeps_half, adds_root=True, renamed=renamed, unused=unused
    )


_TIED_HEAD = r"lm_head\.weight"
_NOTHING = r""


def weights_bytes(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_tied: bool,
    names: TensorNames | None = None,
    compiles: bool = True,
    without: str = _NOTHING,
) -> int:
    """Return the bytes of a model's weights in memory: exact for floating point, approximate for quantized ones.

    Tensors whose whole name matches `without` are left out.
    """
    keeps = partial(keeps_half, inputs=dtype, device=device, compiles=compiles)
    with open_weights(path, dtype, torch.device("cpu"), keeps_half=keeps, names=names) as checkpoint:
        return checkpoint.num_bytes_loaded(f"{_TIED_HEAD if is_tied else _NOTHING}|{without}")


_log = logging.getLogger(__name__)

# Older checkpoints store the rotary frequencies, which are computed here.
_STORED_FREQUENCIES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

CACHE_SCALES = r"self_attn\.((attn\.)?[qkv]_scale|kv_scale|[kv]_proj\.(output|[kv])_scale)"
"""Quantized checkpoints may have scales for a quantized KV cache, which ours is not: names below that of a layer."""


_NOT_QUANTIZED = "config.json names the quantization %r, but the files hold plain numbers alone: they are served so"


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
    tapped_layers: tuple[int, ...] = (),
    progress: Progress | None = None,
    linears: LinearFactory | None = None,
    make: Callable[..., CausalLM] = CausalLM,
    num_adapters: int = 0,
) -> CausalLM:
    """Load a model. A file, field or tensor that is missing, malformed or not supported is a `HeadraceError`.

    Args:
        directory: Holds `config.json` and safetensors weights, or a GGUF file; or that file itself.
        dtype: float32, bfloat16 or float16; weights are converted to it, except matrices of 16 bits where
            linear layers take them for float32.
        device: Where the model runs.
        max_model_len: Serve shorter sequences than the model could; bounds the rotary table.
        tapped_layers: As of `ModelConfig`.
        progress: As of `Checkpoint`.
        linears: Makes its linear layers; None makes one for this model alone.
        make: Takes the weights: all of them, or those that a process has of a model which several have.
        num_adapters: Adapters that may be loaded at once.
    """
    config = read_model_config(directory)
    if max_model_len is not None and max_model_len < config.max_model_len:
        config = dataclasses.replace(config, max_model_len=max_model_len)
    config = dataclasses.replace(config, tapped_layers=tapped_layers)
    keeps = partial(keeps_half, inputs=dtype, device=device)
    with ExitStack() as files:
        checkpoint = open_weights(directory, dtype, device, progress, keeps_half=keeps, names=config.block.names)
        files.push(checkpoint)
        method = config.quantization
        _log_notes(config, checkpoint)
        quantized = None if method is None else QuantizedLayers(method, checkpoint)
        linears = linears or LinearFactory(free_host_bytes, dtype)
        adapters = AdapterTargets(num_adapters, device, dtype) if num_adapters else None
        model = make(config, checkpoint, dtype, device, linears, quantized, adapters)
        checkpoint.discard(_STORED_FREQUENCIES)
        for pattern in config.block.names.unused:
            # Those of other formats were left out when the files were opened.
            checkpoint.discard(pattern)
        if isinstance(checkpoint, Checkpoint) and checkpoint.num_unused:
            message = "%d tensors that text does not need, such as those of towers for images or sound, are not loaded"
            _log.info(message, checkpoint.num_unused)
        if method is not None:
            checkpoint.discard(rf"model\.layers\.\d+\.{CACHE_SCALES}")
        checkpoint.check_all_taken()
        if model.placed_experts:
            # Experts are read when they move.
            weakref.finalize(model, files.pop_all().close)
    return model


def _log_notes(config: ModelConfig, checkpoint: StoredWeights) -> None:
    if config.quantization is not None and isinstance(checkpoint, Checkpoint) and checkpoint.is_plain():
        _log.warning(_NOT_QUANTIZED, config.quantization.name)
    for note in dict.fromkeys(note_on_length(rope, config.max_model_len) for rope in config.ropes):
        if note is not None:
            _log.warning("%s", note)
