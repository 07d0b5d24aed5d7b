"""Adapters as PEFT stores them, of random numbers, and models that they are merged into."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_adapter(
    directory: Path,
    sizes: dict[str, tuple[int, int]],
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    embedding: str | None = None,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Write an adapter for modules of `(rows, columns)`; `rank_pattern` of the configuration gives some other ranks.

    Args:
        directory: Where to; it is made.
        sizes: Of modules by their names.
        rank: Of all that no pattern names.
        seed: Of the numbers.
        dtype: Of the numbers.
        embedding: The module that is looked up.
        strength: What the numbers are multiplied by.
        config: Further fields.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    patterns: dict[str, int] = config.get("rank_pattern", {})
    for name, (rows, columns) in sizes.items():
        own = next((own for end, own in patterns.items() if name.endswith(end)), rank)
        down = torch.randn(own, columns, generator=generator) * columns**-0.5
        up = torch.randn(rows, own, generator=generator) * 0.3 * strength
        kind = "lora_embedding_{}" if name == embedding else "lora_{}.weight"
        for side, matrix in (("A", down), ("B", up)):
            tensors[f"base_model.model.{name}.{kind.format(side)}"] = matrix.to(dtype).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def linear_sizes(model: Any, pattern: str = r".*") -> dict[str, tuple[int, int]]:
    """Return the output and input features of a model's linear layers, by their names."""
    sizes = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_transposed = type(module).__name__ == "Conv1D"
        if (isinstance(module, torch.nn.Linear) or is_transposed) and re.fullmatch(pattern, name):
            assert isinstance(weight, torch.Tensor)
            sizes[name] = (weight.shape[1], weight.shape[0]) if is_transposed else (weight.shape[0], weight.shape[1])
    return sizes


@torch.no_grad()
def merge(model: Any, directory: Path) -> None:
    """Add an adapter's products to the weights of an oracle, as its equation says."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    modules = dict(model.named_modules())
    for name, down in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.*)\.lora_(embedding_)?A(\.weight)?", name)
        if match is None:
            continue
        up = tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        alphas = config.get("alpha_pattern", {})
        alpha = next((own for end, own in alphas.items() if match[1].endswith(end)), config["lora_alpha"])
        rank = len(down)
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        delta = scale * up.float() @ down.float()
        weight = modules[match[1]].weight
        weight += delta.T if match[2] or type(modules[match[1]]).__name__ == "Conv1D" else delta
