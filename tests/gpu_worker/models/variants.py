"""Small random models of every family and option, made by `transformers`, which is the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TRAINED_LEN = 32


def scaled(rope_type: str, max_position_embeddings: int, **parameters: Any) -> dict[str, Any]:
    rope = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0, **parameters}
    return {"rope_parameters": rope, "max_position_embeddings": max_position_embeddings}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-linear": ("Llama", scaled("linear", TRAINED_LEN)),
    "llama-llama3": (
        "Llama", scaled("llama3", 128, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama-yarn": ("Llama", scaled("yarn", 128, original_max_position_embeddings=32)),
    "llama-yarn-options": (
        "Llama",
        scaled(
            "yarn", TRAINED_LEN, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=0.5, truncate=False,
            mscale=0.7, mscale_all_dim=0.3,
        ),
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-partial-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", scaled("yarn", TRAINED_LEN, attention_factor=1.3, original_max_position_embeddings=32)),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases-layer-types": (
        "Qwen3",
        {
            "head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral-window": ("Mistral", {"head_dim": 32, "sliding_window": 10}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama-dynamic": ("Llama", scaled("dynamic", TRAINED_LEN)),
}  # fmt: skip


def save_variant(name: str, directory: Path, **save_options: Any) -> Any:
    """Save a random model of a variant, and return it."""
    family, options = VARIANTS[name]
    model = new_model(family, {**SIZES, **options}, seed=sum(name.encode()))
    randomize(model)
    model.save_pretrained(directory, **save_options)
    return model


def new_model(family: str, options: Mapping[str, Any], *, seed: int, model: str | None = None) -> Any:
    """Make a model as `transformers` begins to train it, and leave torch's generator behind that.

    Args:
        family: Beginning of the name of the configuration's class.
        options: Of the configuration.
        seed: Of the generator.
        model: Beginning of the name of the model's class, where it is another.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(seed)
    names = (f"{model or family}{end}" for end in ("ForCausalLM", "LMHeadModel"))
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    return model_class._from_config(config, attn_implementation="eager").eval()


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter a spread that matters: by default norms are one, biases zero, and attention is uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # Rates from a tenth to four, as in trained models.
                parameter.copy_(parameter.uniform_(0.1, 4).log())
            elif name.endswith("norm.weight") or "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(-1.5, 1.5)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))


def oracle_logits(model: Any, token_ids: torch.Tensor, num_prompt_tokens: int | None = None) -> torch.Tensor:
    """Logits after each token: from one pass, or from a prompt and then token by token through the oracle's cache."""
    from transformers import DynamicCache

    with torch.inference_mode():
        if num_prompt_tokens is None:
            return model(token_ids[None], use_cache=False).logits[0]
        # From version 5.24 on the argument has another name.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache = {name: DynamicCache(config=model.config)}
        parts = [token_ids[:num_prompt_tokens], *token_ids[num_prompt_tokens:].split(1)]
        rows = [model(part[None], use_cache=True, **cache).logits[0] for part in parts]
    return torch.cat(rows)
