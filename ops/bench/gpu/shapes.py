"""The models that the kernels and whole steps are measured at, by their published `config.json` in `models/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "models"
_DENSE = ("llama", "qwen3")


class _Count:
    """A property of a `ModelShape`: a whole number of its fields."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, shape: ModelShape, owner: type[ModelShape]) -> int:
        return int(shape.fields[self._field])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, and how much of it is measured: its first layers, in full width, with the whole vocabulary.

    Attributes:
        name: Of the published model.
        fields: Of its `config.json`, those that say what it computes; lists have an entry a layer.
        num_layers: Layers that are measured: as many as leave room for a cache on a GPU of 78 GiB.
        checked: Fields that differ where two layers are compared with `transformers`, so that both kinds of layers are
            among the two.
    """

    name: str
    fields: Mapping[str, Any]
    num_layers: int
    checked: Mapping[str, Any]

    @classmethod
    def published(cls, name: str, num_layers: int | None = None, **checked: Any) -> ModelShape:
        """Read a file of `models/`; all of its layers are measured where no number is given."""
        fields = json.loads((_FOLDER / f"{name}.json").read_text())
        return cls(name, fields, num_layers or fields["num_hidden_layers"], checked)

    @property
    def is_dense(self) -> bool:
        """Whether every token meets all weights, and every layer attends with keys and values."""
        return self.fields["model_type"] in _DENSE

    @property
    def label(self) -> str:
        """The name and, where the suites differ in it, how many layers there are."""
        return self.name if self.is_dense else f"{self.name}/{self.num_layers}L"

    hidden_size = _Count("hidden_size")
    intermediate_size = _Count("intermediate_size")
    vocab_size = _Count("vocab_size")
    num_heads = _Count("num_attention_heads")
    num_kv_heads = _Count("num_key_value_heads")
    head_dim = _Count("head_dim")

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Return a dense layer's matrices as (out_features, in_features), those that share inputs fused."""
        query_size = self.num_heads * self.head_dim
        return {
            "qkv": (query_size + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "output": (self.hidden_size, query_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }

    def config(self) -> dict[str, Any]:
        """Return the fields of a checkpoint that ends after the measured layers."""
        cut = {
            name: value[: self.num_layers] if isinstance(value, list) else value for name, value in self.fields.items()
        }
        return {**cut, "num_hidden_layers": self.num_layers}

    def first(self, num_layers: int) -> ModelShape:
        """Return the model to check, cut off after `num_layers` layers."""
        return replace(self, fields={**self.fields, **self.checked}, num_layers=num_layers)

    def shard(self, num_ranks: int) -> ModelShape:
        """Return what one of several tensor parallel ranks computes between sums, as a dense model of its own."""
        divided = {
            name: max(1, self.fields[name] // num_ranks)
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        }
        return replace(self, name=f"{self.name}/TP{num_ranks}", fields={**self.fields, **divided})

    def without(self, field: str) -> ModelShape:
        """Return the same without a field."""
        return replace(self, fields={name: value for name, value in self.fields.items() if name != field})


LLAMA3_8B = ModelShape.published("Llama-3-8B")
QWEN3_06B = ModelShape.published("Qwen3-0.6B")
QWEN3_4B = ModelShape.published("Qwen3-4B")
QWEN3_32B = ModelShape.published("Qwen3-32B")
LLAMA3_70B_TP8 = ModelShape.published("Llama-3-70B").shard(8)
DENSE_MODELS = (LLAMA3_8B, QWEN3_06B, QWEN3_4B, QWEN3_32B)

QWEN3_30B_A3B = ModelShape.published("Qwen3-30B-A3B", 24)
GPT_OSS_20B = ModelShape.published("gpt-oss-20b")
DEEPSEEK_V2_LITE = ModelShape.published("DeepSeek-V2-Lite")
QWEN3_NEXT_80B = ModelShape.published("Qwen3-Next-80B-A3B", 12, full_attention_interval=2)
