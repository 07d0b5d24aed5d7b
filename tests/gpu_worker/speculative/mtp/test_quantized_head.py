"""The head of a quantized checkpoint, of which some matrices have scales and others have been left alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.mtp.head import load_head
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.quantization.packers import fp8_blocks
from tests.gpu_worker.speculative.mtp.headed_models import save_headed

LENGTH, BLOCK = 12, 4


def quantize(directory: Path) -> int:
    """Store matrices in FP8 with scales by block, as DeepSeek does, but for the projection of both vectors."""
    tensors = load_file(directory / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight") and not name.endswith("eh_proj.weight")]
    for name in names:
        layer = fp8_blocks(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in layer.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))
    return sum(name.startswith("model.layers.2.") for name in names)


def yielded(directory: Path, hidden: torch.Tensor) -> torch.Tensor:
    """Return what the head makes of a sequence."""
    head = load_head(directory, load_model(directory, torch.float32, CPU))
    cache = allocate_kv_cache(LENGTH // BLOCK, BLOCK, head.config, head.dtype, CPU)
    positions = torch.arange(LENGTH)
    context = AttentionContext(
        caches=cache.layers,
        slot_mapping=positions,
        block_tables=torch.arange(LENGTH // BLOCK, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, LENGTH], dtype=torch.int32),
        context_lens=torch.tensor([LENGTH], dtype=torch.int32),
        max_query_len=LENGTH,
        max_context_len=LENGTH,
    )
    with torch.inference_mode():
        return head.forward(positions + 7, hidden, positions, context)


def test_head_with_scales_by_block_is_near_the_plain_one(tmp_path: Path) -> None:
    save_headed("deepseek-v3", tmp_path)
    hidden = torch.randn(LENGTH, 48, generator=torch.Generator().manual_seed(1))
    plain = yielded(tmp_path, hidden)
    assert quantize(tmp_path) > 20
    error = (yielded(tmp_path, hidden) - plain).norm() / plain.norm()
    assert 0.001 < error < 0.1
