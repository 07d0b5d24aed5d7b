"""Whole steps of the engine: decodes, with drafts and without, prefills, loads of both, and the prefix cache."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from ops.bench.gpu.case import Case, CaseSpec, Check, OpSuite
from ops.bench.gpu.shapes import (
    DEEPSEEK_V2_LITE,
    GPT_OSS_20B,
    LLAMA3_8B,
    LLAMA3_70B_TP8,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_NEXT_80B,
    ModelShape,
)

_CONTEXT = 1024
_DECODES = {"context": _CONTEXT, "num_steps": 64}
_BATCHES = (1, 8, 64, 256)
_PEER_STEPS = 32
# Without FlashAttention, generate_batch attends from every token to those of all sequences: more would take minutes.
_PEER_BATCHES = (1, 64)
_PREFILL_TOKENS = 8192
_SHORT_PREFILL_TOKENS = 1024
_DRAFTS = 4
_ACCEPTANCE = 0.7
_CODES = "quantization_config"
_LENGTHS = (333, 61)
# As many sequences as a graph has rows, so that the two compute the same shapes.
_GRAPH_SEQS, _GRAPH_TOKENS = 8, 24
_TOLERANCE = 1e-3
# What experts in codes are given is rounded to 16 bits, in float32 too.
_CODED_TOLERANCE = 2e-2


class MissingPackageError(ImportError):
    """The engine needs a package that this machine lacks; `package` names it."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"whole steps need {package}: python3 -m pip install {package}, or, without a network, unpack its wheel "
            "into a folder and name that in PYTHONPATH; --only runs the kernels without it"
        )
        self.package = package


def load_step_module(name: str) -> Any:
    """Import a module of `ops.bench.gpu.step` when its turn comes: the kernels' bench needs no engine.

    Raises:
        MissingPackageError: Something that it needs is not installed.
    """
    try:
        return import_module(f"ops.bench.gpu.step.{name}")
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name or str(error)) from error


def step_checks(
    device: torch.device, shape: ModelShape, lengths: tuple[int, ...] = _LENGTHS, num_new: int = _GRAPH_TOKENS
) -> list[Check]:
    """Return the checks that come before a shape is timed: two layers, and one where experts are stored in codes.

    Of coded experts there is one layer, because a second one's routing would see the rounding of the first.
    """
    correctness = load_step_module("correctness")
    two_layers = shape.first(2)
    graphs = partial(correctness.graphs_error, device, two_layers, _GRAPH_SEQS, lengths[0], num_new)
    checks = [Check(f"{shape.name} tokens with and without graphs", graphs, 0.0)]
    if shape.is_dense:
        cosine = partial(correctness.cosine_error, device, two_layers, lengths)
        return [Check(f"{shape.name} logits, 1 - cosine", cosine, _TOLERANCE), *checks]
    logits = partial(correctness.routed_error, device, two_layers.without(_CODES), lengths)
    checks.insert(0, Check(f"{shape.name} float32 logits", logits, _TOLERANCE))
    if _CODES in shape.fields:
        coded = partial(correctness.routed_error, device, shape.first(1), lengths)
        checks.append(Check(f"{shape.name} logits, coded experts", coded, _CODED_TOLERANCE))
    return checks


def _spec(label: str, shape: ModelShape, function: str, **arguments: Any) -> CaseSpec:
    def build(device: torch.device) -> Case:
        case: Case = getattr(load_step_module("steps"), function)(device, shape=shape, **arguments)
        return case

    return CaseSpec(f"{shape.label} {label}", build)


def _suite(name: str, shape: ModelShape, *cases: CaseSpec) -> OpSuite:
    return OpSuite(name, partial(step_checks, shape=shape), cases)


def _decode(
    shape: ModelShape, num_seqs: int, has_peer: bool = False, context: int = _CONTEXT, rounded: str | None = None
) -> CaseSpec:
    num_peer_steps = _PEER_STEPS if has_peer and num_seqs in _PEER_BATCHES else 0
    sizes = {**_DECODES, "num_seqs": num_seqs, "num_peer_steps": num_peer_steps, "context": context, "rounded": rounded}
    label = f"{num_seqs} x {context}" + (f" {rounded}" if rounded else "")
    return _spec(label, shape, "decode_case", **sizes)


def _decodes(
    suffix: str, shape: ModelShape, batches: tuple[int, ...] = _BATCHES, has_peer: bool = False, context: int = _CONTEXT
) -> OpSuite:
    cases = (_decode(shape, num_seqs, has_peer, context) for num_seqs in batches)
    return _suite(f"decode_step_{suffix}", shape, *cases)


def _prompt(label: str, shape: ModelShape, num_tokens: int = _PREFILL_TOKENS, **arguments: Any) -> CaseSpec:
    return _spec(f"{label} {num_tokens}", shape, "prefill_case", num_tokens=num_tokens, num_prompts=7, **arguments)


def _prefill(suffix: str, shape: ModelShape) -> OpSuite:
    return _suite(f"prefill_step_{suffix}", shape, _prompt("1 x", shape))


def _both(suffix: str, shape: ModelShape) -> OpSuite:
    # Of a size at which the host is expected to take longer than the device, launched and replayed.
    short = (
        _prompt("prefill", shape, _SHORT_PREFILL_TOKENS),
        _prompt("graph", shape, _SHORT_PREFILL_TOKENS, has_graphs=True),
    )
    decodes = (_decode(shape, num_seqs) for num_seqs in _BATCHES)
    return _suite(f"model_step_{suffix}", shape, *decodes, *short, _prompt("prefill", shape))


def _throughput(num_seqs: int, prompt: int, new: int, has_peer: bool) -> CaseSpec:
    sizes = {"num_seqs": num_seqs, "prompt": prompt, "new": new, "has_peer": has_peer}
    return _spec(f"{num_seqs} x {prompt} in {new} out", LLAMA3_8B, "throughput_case", **sizes)


def _verified(num_seqs: int) -> CaseSpec:
    label = f"{num_seqs} x {_CONTEXT}, {_DRAFTS} drafts"
    sizes = {"num_seqs": num_seqs, "num_drafts": _DRAFTS, **_DECODES}
    return _spec(label, LLAMA3_8B, "verification_case", **sizes)


def _scripted(num_seqs: int, prompt: int, new: int) -> CaseSpec:
    label = f"{num_seqs} x {prompt}/{new}, {_ACCEPTANCE:.0%} scripted"
    sizes = {"num_seqs": num_seqs, "prompt": prompt, "new": new, "num_drafts": _DRAFTS}
    return _spec(label, LLAMA3_8B, "scripted_case", **sizes, acceptance=_ACCEPTANCE)


DECODE_8B = _decodes("8b", LLAMA3_8B, has_peer=True)
# Contexts that are as long as a conversation's, and weights as they are mostly served: their kernels are checked apart.
DECODE_8B_LONG = _decodes("8b_4k", LLAMA3_8B, (1, 64), context=4096)
DECODE_8B_ROUNDED = OpSuite(
    "decode_rounded_8b",
    lambda device: [],
    tuple(_decode(LLAMA3_8B, num_seqs, rounded=rounded) for rounded in ("fp8", "int4") for num_seqs in (1, 16, 64)),
)
# What a rank of eight does between sums, which `ops.bench.gpu.sums` measures where there are eight.
SHARD_70B = _suite(
    "step_70b_tp8",
    LLAMA3_70B_TP8,
    *(_decode(LLAMA3_70B_TP8, num_seqs) for num_seqs in _BATCHES),
    _prompt("1 x", LLAMA3_70B_TP8),
)
DECODE_06B = _decodes("0.6b", QWEN3_06B, has_peer=True)
DECODE_4B = _decodes("4b", QWEN3_4B)
DECODE_32B = _decodes("32b", QWEN3_32B, (1, 8, 64))
PREFILL_8B = _prefill("8b", LLAMA3_8B)
PREFILL_06B = _prefill("0.6b", QWEN3_06B)
PREFILL_4B = _prefill("4b", QWEN3_4B)
PREFILL_32B = _prefill("32b", QWEN3_32B)
MIXTURE_STEPS = _both("moe", QWEN3_30B_A3B)
CODED_MIXTURE_STEPS = _both("oss", GPT_OSS_20B)
LATENT_STEPS = _both("mla", DEEPSEEK_V2_LITE)
HYBRID_STEPS = _both("next", QWEN3_NEXT_80B)
VERIFICATION = _suite(
    "verification_step", LLAMA3_8B, *map(_verified, _BATCHES), _scripted(1, 128, 256), _scripted(64, 128, 256)
)
# A tenth of the output beside a peer, half of it without: what ten minutes leave room for.
THROUGHPUT = _suite("throughput", LLAMA3_8B, _throughput(256, 1000, 500, False), _throughput(64, 1000, 100, True))
_PROMPTS = {"num_tokens": _PREFILL_TOKENS, "num_prompts": 7}
PREFIX_CACHE = _suite(
    "prefix_cache", LLAMA3_8B, _spec(f"{_PREFILL_TOKENS} 0% hits", LLAMA3_8B, "prefix_cache_case", **_PROMPTS)
)
