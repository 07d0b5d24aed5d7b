"""Small models with correlated inputs to quantize, made by `transformers`, and texts to calibrate them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gpu_worker.models.loader import load_model
from ops.quantize.job_settings import QuantizeJob
from tests.gpu_worker.models.paged_run import PagedRun

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 43)
TEXT = "the quick brown fox jumps over the lazy dog while seven wizards mix a potion of quartz and jade. " * 40
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def save_model(directory: Path, family: str = "llama", **options: Any) -> Any:
    # Not at the top: each process of a test run imports this module, and few of them save a model.
    import transformers

    torch.manual_seed(5)
    prefix = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | options))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3.0)
            elif "layernorm" in name:
                # Unlike magnitudes of the inputs: the second moments have to matter.
                parameter.copy_(torch.rand_like(parameter).mul_(3).exp_())
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], initial_alphabet=sorted(alphabet)[:110])
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    (directory / "text.txt").write_text(TEXT)
    return model


def job_for(model: Path, out: Path, method: str, samples: int = 8) -> QuantizeJob:
    return QuantizeJob(model, out, method, 32, model / "text.txt", samples, window=32, device="cpu")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def logits_of(directory: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return PagedRun(load_model(directory, torch.float32, CPU), [tokens]).step({0: len(tokens)})[0]


def correlated_inputs(num_tokens: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Return inputs with few directions and a few loud features, as real ones have, float32."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(num_inputs // 4, num_inputs, generator=generator)
    inputs = torch.randn(num_tokens, num_inputs // 4, generator=generator) @ mixing
    inputs += torch.randn(num_tokens, num_inputs, generator=generator) * 0.3
    inputs[:, ::17] *= 20
    return inputs
