"""Whole steps of models that are more than a dense decoder: experts, latent attention, recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ops.bench.gpu.case import CaseSpec, Check, OpSuite
from ops.bench.gpu.cases.steps import build_case, load_step_module
from ops.bench.gpu.published import DEEPSEEK_V2_LITE, GPT_OSS_20B, QWEN3_30B_A3B, QWEN3_NEXT_80B, PublishedShape

_CONTEXT, _DECODE_STEPS = 1024, 64
_BATCHES = (1, 8, 64, 256)
_PREFILL_TOKENS, _PROMPTS = 8192, 7
_CODES = "quantization_config"
_LENGTHS = (333, 61)
# As many sequences as a graph has rows, so that the two compute the same shapes.
_GRAPH_SEQS, _GRAPH_TOKENS = 8, 24
_TOLERANCE = 1e-3
# What experts in codes are given is rounded to 16 bits, in float32 too.
_CODED_TOLERANCE = 2e-2


def published_checks(device: torch.device, shape: PublishedShape, lengths: tuple[int, ...] = _LENGTHS) -> list[Check]:
    """Return the checks that come before a shape is timed: two layers, and one where experts are stored in codes.

    Of coded experts there is one layer, because a second one's routing would see the rounding of the first.
    """
    correctness = load_step_module("published_correctness")
    two_layers = shape.first(2)
    graphs = partial(correctness.graphs_error, device, two_layers, _GRAPH_SEQS, lengths[0], _GRAPH_TOKENS)
    logits = partial(correctness.logits_error, device, two_layers.without(_CODES), lengths)
    checks = [
        Check(f"{shape.name} float32 logits", logits, _TOLERANCE),
        Check(f"{shape.name} tokens with and without graphs", graphs, 0.0),
    ]
    if _CODES in shape.fields:
        coded = partial(correctness.logits_error, device, shape.first(1), lengths)
        checks.append(Check(f"{shape.name} logits, coded experts", coded, _CODED_TOLERANCE))
    return checks


def _spec(shape: PublishedShape, label: str, function: str, **arguments: Any) -> CaseSpec:
    build = partial(build_case, module="published_steps", function=function, shape=shape, **arguments)
    return CaseSpec(f"{shape.label} {label}", build)


def _decode(shape: PublishedShape, num_seqs: int) -> CaseSpec:
    sizes = {"num_seqs": num_seqs, "context": _CONTEXT, "num_steps": _DECODE_STEPS}
    return _spec(shape, f"{num_seqs} x {_CONTEXT}", "published_decode_case", **sizes)


def _suite(suffix: str, shape: PublishedShape) -> OpSuite:
    """Return decodes and a prefill of a model: its checks take long, and are made once for both."""
    prefill = {"num_tokens": _PREFILL_TOKENS, "num_prompts": _PROMPTS}
    cases = (
        *(_decode(shape, num_seqs) for num_seqs in _BATCHES),
        _spec(shape, f"prefill {_PREFILL_TOKENS}", "published_prefill_case", **prefill),
    )
    return OpSuite(f"model_step_{suffix}", partial(published_checks, shape=shape), cases)


MIXTURE_STEPS = _suite("moe", QWEN3_30B_A3B)
CODED_MIXTURE_STEPS = _suite("oss", GPT_OSS_20B)
LATENT_STEPS = _suite("mla", DEEPSEEK_V2_LITE)
HYBRID_STEPS = _suite("next", QWEN3_NEXT_80B)
