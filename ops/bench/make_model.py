"""Makes models of the benchmark's shapes: random weights in bfloat16 and a tokenizer of as many words.

What a step costs does not depend on the values.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ops.bench.gpu.shapes import ModelShape
from ops.bench.gpu.step.random_model import random_model

_DRAWN = 1 << 22
_CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama.

    With experts, of a Mixtral; `intermediate_size` is then that of an expert. With `attends_every`, of a Qwen3.5: one
    layer in `attends_every` attends, the others are recurrent, with as many heads of the same size.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool
    max_len: int = 2048
    num_experts: int = 0
    experts_per_token: int = 2
    attends_every: int = 0

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_heads


SHAPES = {
    "15m": Shape(4096, 384, 1536, 6, 6, 2, is_tied=True),
    "160m": Shape(32000, 768, 3072, 12, 12, 4, is_tied=False),
    # As many weights, of which a token meets half.
    "160m-moe": Shape(32000, 768, 416, 12, 12, 4, is_tied=False, num_experts=8),
    "160m-hybrid": Shape(32000, 768, 2560, 12, 6, 2, is_tied=False, attends_every=4),
    # Of Llama-3.2-1B.
    "1b": Shape(128_256, 2048, 8192, 16, 32, 8, is_tied=True),
}


def make_model(shape: Shape, directory: Path) -> None:
    """Write configuration, bfloat16 weights and tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration(shape), indent=2))
    normal = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = {name: _values(size, normal) for name, size in weight_shapes(shape).items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _save_tokenizer(shape.vocab_size, directory)


def configuration(shape: Shape) -> dict[str, object]:
    """Return what `config.json` says of a shape."""
    return {
        **_family(shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _family(shape: Shape) -> dict[str, object]:
    """Return the fields by which a shape's family differs from others."""
    if shape.num_experts:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "sliding_window": None,
        }
    if shape.attends_every:
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "full_attention_interval": shape.attends_every,
            "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": _CONV_WIDTH,
            "linear_num_key_heads": shape.num_heads,
            "linear_num_value_heads": shape.num_heads,
            "linear_key_head_dim": shape.head_dim,
            "linear_value_head_dim": shape.head_dim,
        }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint: what our model asks for; those of one dimension are ones."""
    model = ModelShape("bench", configuration(shape), shape.num_layers, {})
    _, asked = random_model(model, shape.max_len, torch.device("meta"), keeps_tensors=True, stacks_experts=False)
    return {name: tuple(tensor.shape) for name, tensor in asked.tensors.items()}


def _values(size: tuple[int, ...], normal: torch.Tensor) -> torch.Tensor:
    """Repeat the drawn numbers, scaled so that hidden vectors keep their size: drawing billions takes minutes."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    count = math.prod(size)
    repeated = normal.repeat(-(-count // len(normal)))[:count].view(size)
    return repeated.mul_(1 / math.sqrt(size[1]))


def _save_tokenizer(vocab_size: int, directory: Path) -> None:
    """Save one word a token, so that any output can be decoded and counted."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, vocab_size))]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
