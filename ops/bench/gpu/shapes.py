"""The shapes of the models that the kernels are measured at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder, from its published configuration."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_qk_norm: bool

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Return the layer's matrices as (out_features, in_features), those that share inputs fused."""
        query_size = self.num_heads * self.head_dim
        return {
            "qkv": (query_size + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "output": (self.hidden_size, query_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


LLAMA3_8B = ModelShape("Llama-3-8B", 4096, 32, 8, 128, 14_336, 128_256, has_qk_norm=False)
QWEN3_06B = ModelShape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151_936, has_qk_norm=True)
QWEN3_4B = ModelShape("Qwen3-4B", 2560, 32, 8, 128, 9728, 151_936, has_qk_norm=True)
QWEN3_32B = ModelShape("Qwen3-32B", 5120, 64, 8, 128, 25_600, 151_936, has_qk_norm=True)
MODELS = (LLAMA3_8B, QWEN3_06B, QWEN3_4B, QWEN3_32B)
