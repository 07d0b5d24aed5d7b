"""What `quant` measures of one engine and precision, and how it is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from ops.bench.engine import Measurement


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a model does on a text.

    Attributes:
        perplexity: Of the text.
        same_token: Share of places at which its most likely token is that of the plain model.
        num_tokens: Places of the text.
    """

    perplexity: float
    same_token: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and precision.

    Attributes:
        num_bytes: Of the weights.
        measured: Speeds by batch size, in ascending order.
        quality: None where it is not measured.
    """

    name: str
    num_bytes: int
    measured: dict[int, Measurement]
    quality: Quality | None = None

    @property
    def prefill_rate(self) -> float | None:
        """Return the rate with the largest batch."""
        return list(self.measured.values())[-1].prefill_rate if self.measured else None

    def figures(self) -> dict[str, object]:
        """Return what is printed and recorded."""
        rates = {f"decode_tokens_per_s_at_{batch}": round(one.decode_rate, 1) for batch, one in self.measured.items()}
        prefill = {} if self.prefill_rate is None else {"prefill_tokens_per_s": round(self.prefill_rate)}
        quality: dict[str, object] = {}
        if self.quality is not None:
            quality = {
                "perplexity": round(self.quality.perplexity, 4),
                "same_token_percent": round(100 * self.quality.same_token, 2),
                "held_out_tokens": self.quality.num_tokens,
            }
        return {"name": self.name, "weights_mb": round(self.num_bytes / 1e6, 1), **quality, **rates, **prefill}
