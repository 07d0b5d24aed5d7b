"""What `quant` measures of one engine and precision, and how it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from ops.bench.engine import Measurement


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and precision.

    Attributes:
        num_bytes: Of the weights.
        measured: Speeds by batch size, in ascending order.
        quality: As it is recorded; empty where it is not measured.
    """

    name: str
    num_bytes: int
    measured: dict[int, Measurement]
    quality: dict[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        """Return what is printed and recorded."""
        rates = {f"decode_tokens_per_s_at_{batch}": round(one.decode_rate, 1) for batch, one in self.measured.items()}
        figures = {"name": self.name, "weights_mb": round(self.num_bytes / 1e6, 1), **self.quality, **rates}
        if self.measured:
            # With the largest batch.
            figures["prefill_tokens_per_s"] = round(list(self.measured.values())[-1].prefill_rate)
        return figures
