"""Our model in a published shape, and the weights it was given."""

from __future__ import annotations

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.families import llama, qwen3
from kernels.linear import LinearFactory
from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.random_weights import RandomWeights


def random_model(
    shape: ModelShape, max_model_len: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[CausalLM, RandomWeights]:
    """Make the model; `max_model_len` bounds the rotary table."""
    weights = RandomWeights(dtype, device)
    return CausalLM(model_config(shape, max_model_len), weights, dtype, device, LinearFactory(free_host_bytes)), weights


def model_config(shape: ModelShape, max_model_len: int) -> ModelConfig:
    """Return the configuration that a checkpoint of this shape has, with its rotary positions unscaled."""
    return ModelConfig(
        architecture=qwen3.ARCHITECTURE if shape.has_qk_norm else llama.ARCHITECTURE,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope=RopeParameters(RopeType.DEFAULT, shape.rope_theta, max_model_len),
        max_model_len=max_model_len,
        layer_windows=(None,) * shape.num_layers,
        tie_word_embeddings=shape.ties_embeddings,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=shape.has_qk_norm,
        eos_token_ids=frozenset(),
        bos_token_id=None,
        dtype=torch.bfloat16,
    )
