"""The head that scores classes, in float32, and how it is taken from a checkpoint, by the names of its family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_source import WeightSource
from gpu_worker.layers.norms import LayerNorm, Norm
from gpu_worker.models.config import ModelConfig
from kernels.activation import Activation, activate
from kernels.linear import Linear, LinearFactory


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The head of a model that classifies, in float32; without `activation`, tanh follows `dense`."""

    classes: Linear
    dense: Linear | None = None
    activation: Activation | None = None
    norm: Norm | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, num_classes]` for `hidden: [num_rows, hidden_size]`, both float32."""
        if self.dense is not None:
            hidden = self.dense(hidden)
            if self.activation is None:
                # Row by row: of several at once, torch rounds a number by where it lies among all of them.
                hidden = torch.cat([torch.tanh(row) for row in torch.split(hidden, 1)])
            else:
                hidden = activate(hidden, self.activation)
        return self.classes(hidden if self.norm is None else self.norm(hidden))


def take_class_head(config: ModelConfig, source: WeightSource, linears: LinearFactory) -> ClassHead | None:
    """Return the head, its matrices made by `linears`; None for a model without classes."""
    size, count = config.hidden_size, config.num_classes
    if not count:
        return None

    def take(name: str, *shape: int) -> torch.Tensor:
        return source.take(name, *shape).float()

    if config.architecture == "ModernBertModel":
        return _take_modern(config, source, linears)
    if config.encoder is None:
        return ClassHead(linears.make(take("score.weight", count, size)))
    is_bert = config.architecture == "BertModel"
    dense, out = ("pooler.dense", "classifier") if is_bert else ("classifier.dense", "classifier.out_proj")
    return ClassHead(
        linears.make(take(f"{out}.weight", count, size), take(f"{out}.bias", count)),
        linears.make(take(f"{dense}.weight", size, size), take(f"{dense}.bias", size)),
    )


def _take_modern(config: ModelConfig, source: WeightSource, linears: LinearFactory) -> ClassHead:
    size, count, kind = config.hidden_size, config.num_classes, config.block.norm

    def take(name: str, *shape: int) -> torch.Tensor | None:
        return source.take(name, *shape).float() if source.has(name) else None

    def norm() -> LayerNorm:
        bias = source.take("head.norm.bias", size).float() if kind.has_bias else None
        return LayerNorm(source.take("head.norm.weight", size).float(), bias, config.rms_norm_eps)

    dense = linears.make(source.take("head.dense.weight", size, size).float(), take("head.dense.bias", size))
    classes = linears.make(source.take("classifier.weight", count, size).float(), take("classifier.bias", count))
    return ClassHead(classes, dense, Activation.GELU, norm())
