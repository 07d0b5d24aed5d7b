"""Whole steps of the engine: decodes, with drafts and without, prefills, loads of both, and the prefix cache."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from ops.bench.gpu.case import Case, CaseSpec, Check, OpSuite
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_06B, QWEN3_4B, QWEN3_32B, ModelShape

_CONTEXT = 1024
_DECODE_STEPS = 64
_PEER_STEPS = 32
# Without FlashAttention, generate_batch attends from every token to those of all sequences: more would take minutes.
_PEER_BATCHES = (1, 64)
_PREFILL_TOKENS = 8192
_PROMPTS = {"num_tokens": _PREFILL_TOKENS, "num_prompts": 7}
_DRAFTS = 4
_ACCEPTANCE = 0.7


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


def build_case(device: torch.device, module: str, function: str, **arguments: Any) -> Case:
    """Call a function of a step module with the device and these arguments."""
    case: Case = getattr(load_step_module(module), function)(device, **arguments)
    return case


def step_checks(device: torch.device, shape: ModelShape, lengths: tuple[int, ...], num_new: int) -> list[Check]:
    """Return the checks that come before a shape is timed."""
    correctness = load_step_module("correctness")
    logits = partial(correctness.logits_error, device, shape, lengths)
    # As many sequences as a graph has rows, so that the two compute the same shapes.
    graphs = partial(correctness.graphs_error, device, shape, 8, lengths[0], num_new)
    return [
        Check(f"{shape.name} logits, 1 - cosine", logits, 1e-3),
        Check(f"{shape.name} tokens with and without graphs", graphs, 0.0),
    ]


def _spec(label: str, shape: ModelShape, module: str, function: str, **arguments: Any) -> CaseSpec:
    """Return the case of a function of a step module, called with the device, the shape and these arguments."""
    build = partial(build_case, module=module, function=function, shape=shape, **arguments)
    return CaseSpec(f"{shape.name} {label}", build)


def _suite(name: str, shape: ModelShape, cases: list[CaseSpec]) -> OpSuite:
    return OpSuite(name, partial(step_checks, shape=shape, lengths=(333, 61), num_new=24), tuple(cases))


def _decode(suffix: str, shape: ModelShape, batches: tuple[int, ...], has_peer: bool) -> OpSuite:
    def case(num_seqs: int) -> CaseSpec:
        num_peer_steps = _PEER_STEPS if has_peer and num_seqs in _PEER_BATCHES else 0
        sizes = {"num_seqs": num_seqs, "context": _CONTEXT, "num_steps": _DECODE_STEPS}
        label = f"{num_seqs} x {_CONTEXT}"
        return _spec(label, shape, "decode", "decode_case", **sizes, num_peer_steps=num_peer_steps)

    return _suite(f"decode_step_{suffix}", shape, [case(num_seqs) for num_seqs in batches])


def _prefill(suffix: str, shape: ModelShape) -> OpSuite:
    case = _spec(f"1 x {_PREFILL_TOKENS}", shape, "prefill", "prefill_case", **_PROMPTS)
    return _suite(f"prefill_step_{suffix}", shape, [case])


def _throughput(num_seqs: int, prompt: int, new: int, has_peer: bool) -> CaseSpec:
    sizes = {"num_seqs": num_seqs, "prompt": prompt, "new": new}
    label = f"{num_seqs} x {prompt} in {new} out"
    return _spec(label, LLAMA3_8B, "serving", "throughput_case", **sizes, has_peer=has_peer)


def _verified(num_seqs: int) -> CaseSpec:
    sizes = {"num_seqs": num_seqs, "context": _CONTEXT, "num_steps": _DECODE_STEPS, "num_drafts": _DRAFTS}
    label = f"{num_seqs} x {_CONTEXT}, {_DRAFTS} drafts"
    return _spec(label, LLAMA3_8B, "verification", "verification_case", **sizes)


def _scripted(num_seqs: int, prompt: int, new: int) -> CaseSpec:
    sizes = {"num_seqs": num_seqs, "prompt": prompt, "new": new, "num_drafts": _DRAFTS}
    label = f"{num_seqs} x {prompt}/{new}, {_ACCEPTANCE:.0%} scripted"
    return _spec(label, LLAMA3_8B, "verification", "scripted_case", **sizes, acceptance=_ACCEPTANCE)


DECODE_8B = _decode("8b", LLAMA3_8B, (1, 8, 64, 256), has_peer=True)
DECODE_06B = _decode("0.6b", QWEN3_06B, (1, 8, 64, 256), has_peer=True)
DECODE_4B = _decode("4b", QWEN3_4B, (1, 8, 64, 256), has_peer=False)
DECODE_32B = _decode("32b", QWEN3_32B, (1, 8, 64), has_peer=False)
PREFILL_8B = _prefill("8b", LLAMA3_8B)
PREFILL_06B = _prefill("0.6b", QWEN3_06B)
PREFILL_4B = _prefill("4b", QWEN3_4B)
PREFILL_32B = _prefill("32b", QWEN3_32B)
VERIFICATION = _suite(
    "verification_step",
    LLAMA3_8B,
    [*(_verified(num_seqs) for num_seqs in (1, 8, 64, 256)), _scripted(1, 128, 256), _scripted(64, 128, 256)],
)
# A tenth of the output beside a peer, half of it without: what ten minutes leave room for.
THROUGHPUT = _suite("throughput", LLAMA3_8B, [_throughput(256, 1000, 500, False), _throughput(64, 1000, 100, True)])
PREFIX_CACHE = _suite(
    "prefix_cache",
    LLAMA3_8B,
    [_spec(f"{_PREFILL_TOKENS} 0% hits", LLAMA3_8B, "serving", "prefix_cache_case", **_PROMPTS)],
)
