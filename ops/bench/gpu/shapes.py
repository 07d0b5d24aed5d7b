"""The shapes of the models that the kernels and whole steps are measured at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder, from its published configuration; `has_qk_norm` tells Qwen3 from Llama."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_qk_norm: bool
    num_layers: int
    rms_norm_eps: float
    rope_theta: float
    ties_embeddings: bool

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

    @property
    def layer_parameters(self) -> int:
        """Return the numbers in the matrices of all layers: each multiplies every token."""
        return self.num_layers * sum(rows * columns for rows, columns in self.projections.values())

    @property
    def head_parameters(self) -> int:
        """Return the numbers in the matrix that scores the vocabulary: it multiplies sampling rows only."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the keys and values of a token, over all layers, in 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


LLAMA3_8B = ModelShape(
    "Llama-3-8B", 4096, 32, 8, 128, 14_336, 128_256, False,
    num_layers=32, rms_norm_eps=1e-5, rope_theta=500_000.0, ties_embeddings=False,
)  # fmt: skip
QWEN3_06B = ModelShape(
    "Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151_936, True,
    num_layers=28, rms_norm_eps=1e-6, rope_theta=1e6, ties_embeddings=True,
)  # fmt: skip
QWEN3_4B = ModelShape(
    "Qwen3-4B", 2560, 32, 8, 128, 9728, 151_936, True,
    num_layers=36, rms_norm_eps=1e-6, rope_theta=1e6, ties_embeddings=True,
)  # fmt: skip
QWEN3_32B = ModelShape(
    "Qwen3-32B", 5120, 64, 8, 128, 25_600, 151_936, True,
    num_layers=64, rms_norm_eps=1e-6, rope_theta=1e6, ties_embeddings=False,
)  # fmt: skip
MODELS = (LLAMA3_8B, QWEN3_06B, QWEN3_4B, QWEN3_32B)
