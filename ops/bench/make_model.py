"""Makes models of the benchmark's shapes: random weights in bfloat16 and a tokenizer of as many words.

Run as `python -m ops.bench.make_model --shape 160m --out DIR`. What a step costs does not depend on the values.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool
    max_len: int = 2048

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_heads


class Size(Enum):
    """The names of the shapes."""

    M15 = "15m"
    M160 = "160m"


SHAPES = MappingProxyType(
    {
        Size.M15: Shape(4096, 384, 1536, 6, 6, 2, is_tied=True),
        Size.M160: Shape(32000, 768, 3072, 12, 12, 4, is_tied=False),
    }
)


def make_model(shape: Shape, directory: Path) -> None:
    """Write configuration, weights and tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration(shape), indent=2))
    save_file(_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(shape.vocab_size, directory)


def configuration(shape: Shape) -> dict[str, object]:
    """Return what `config.json` says of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint; those of one dimension are norms."""
    size, inner, kv_size = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, size),
        "model.norm.weight": (size,),
    }
    for index in range(shape.num_layers):
        name = f"model.layers.{index}"
        shapes[f"{name}.input_layernorm.weight"] = (size,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (size,)
        shapes[f"{name}.self_attn.q_proj.weight"] = (size, size)
        shapes[f"{name}.self_attn.k_proj.weight"] = (kv_size, size)
        shapes[f"{name}.self_attn.v_proj.weight"] = (kv_size, size)
        shapes[f"{name}.self_attn.o_proj.weight"] = (size, size)
        shapes[f"{name}.mlp.gate_proj.weight"] = (inner, size)
        shapes[f"{name}.mlp.up_proj.weight"] = (inner, size)
        shapes[f"{name}.mlp.down_proj.weight"] = (size, inner)
    if not shape.is_tied:
        shapes["lm_head.weight"] = (shape.vocab_size, size)
    return shapes


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    """Draw weights that keep hidden vectors at unit size, so that no format over- or underflows."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        return (torch.randn(size, generator=generator) / math.sqrt(size[1])).bfloat16()

    return {name: draw(size) for name, size in weight_shapes(shape).items()}


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


def main() -> None:
    """Make the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[size.value for size in Size], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of a sequence at most")
    arguments = parser.parse_args()
    make_model(replace(SHAPES[Size(arguments.shape)], max_len=arguments.max_len), arguments.out)


if __name__ == "__main__":
    main()
