"""Whole steps of the engine: decodes, with drafts and without, prefills, loads of both, and the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
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
_SAMPLES = 7
_DRAFTS = 4
_SHARE_RIGHT = 0.7


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


def _build(device: torch.device, module: str, function: str, make: Callable[[Any], dict[str, object]]) -> Case:
    found = load_step_module(module)
    case: Case = getattr(found, function)(device, **make(found))
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


def _suite(name: str, shape: ModelShape, cases: list[CaseSpec]) -> OpSuite:
    return OpSuite(name, partial(step_checks, shape=shape, lengths=(333, 61), num_new=24), tuple(cases))


def _decode(suffix: str, shape: ModelShape, batches: tuple[int, ...], has_peer: bool) -> OpSuite:
    def case(num_seqs: int) -> CaseSpec:
        num_peer_steps = _PEER_STEPS if has_peer and num_seqs in _PEER_BATCHES else 0

        def make(decode: Any) -> dict[str, object]:
            return {"shape": shape, "load": decode.DecodeLoad(num_seqs, _CONTEXT, _DECODE_STEPS, num_peer_steps)}

        build = partial(_build, module="decode", function="decode_case", make=make)
        return CaseSpec(f"{shape.name} {num_seqs} x {_CONTEXT}", build)

    return _suite(f"decode_step_{suffix}", shape, [case(num_seqs) for num_seqs in batches])


def _prefill(suffix: str, shape: ModelShape) -> OpSuite:
    def make(_: Any) -> dict[str, object]:
        return {"shape": shape, "num_tokens": _PREFILL_TOKENS, "num_prompts": _SAMPLES}

    build = partial(_build, module="prefill", function="prefill_case", make=make)
    return _suite(f"prefill_step_{suffix}", shape, [CaseSpec(f"{shape.name} 1 x {_PREFILL_TOKENS}", build)])


def _throughput() -> OpSuite:
    def case(num_seqs: int, prompt: int, new: int, has_peer: bool) -> CaseSpec:
        def make(serving: Any) -> dict[str, object]:
            return {"shape": LLAMA3_8B, "load": serving.Load(num_seqs, prompt, new), "has_peer": has_peer}

        build = partial(_build, module="serving", function="throughput_case", make=make)
        return CaseSpec(f"{LLAMA3_8B.name} {num_seqs} x {prompt} in {new} out", build)

    # A tenth of the output beside a peer, half of it without: what ten minutes leave room for.
    return _suite("throughput", LLAMA3_8B, [case(256, 1000, 500, False), case(64, 1000, 100, True)])


def _prefix_cache() -> OpSuite:
    def make(_: Any) -> dict[str, object]:
        return {"shape": LLAMA3_8B, "num_tokens": _PREFILL_TOKENS, "num_prompts": _SAMPLES}

    build = partial(_build, module="serving", function="prefix_cache_case", make=make)
    return _suite("prefix_cache", LLAMA3_8B, [CaseSpec(f"{LLAMA3_8B.name} {_PREFILL_TOKENS} 0% hits", build)])


def _verification() -> OpSuite:
    def verify(num_seqs: int) -> CaseSpec:
        def make(verification: Any) -> dict[str, object]:
            load = verification.VerificationLoad(num_seqs, _CONTEXT, _DECODE_STEPS, _DRAFTS)
            return {"shape": LLAMA3_8B, "load": load}

        build = partial(_build, module="verification", function="verification_case", make=make)
        return CaseSpec(f"{LLAMA3_8B.name} {num_seqs} x {_CONTEXT}, {_DRAFTS} drafts", build)

    def serve(num_seqs: int, prompt: int, new: int) -> CaseSpec:
        def make(verification: Any) -> dict[str, object]:
            load = verification.ScriptedLoad(num_seqs, prompt, new, _DRAFTS, _SHARE_RIGHT)
            return {"shape": LLAMA3_8B, "load": load}

        build = partial(_build, module="verification", function="scripted_case", make=make)
        label = f"{LLAMA3_8B.name} {num_seqs} x {prompt}/{new}, {_SHARE_RIGHT:.0%} scripted"
        return CaseSpec(label, build)

    cases = [*(verify(num_seqs) for num_seqs in (1, 8, 64, 256)), *(serve(num_seqs, 128, 256) for num_seqs in (1, 64))]
    return _suite("verification_step", LLAMA3_8B, cases)


DECODE_8B = _decode("8b", LLAMA3_8B, (1, 8, 64, 256), has_peer=True)
DECODE_06B = _decode("0.6b", QWEN3_06B, (1, 8, 64, 256), has_peer=True)
DECODE_4B = _decode("4b", QWEN3_4B, (1, 8, 64, 256), has_peer=False)
DECODE_32B = _decode("32b", QWEN3_32B, (1, 8, 64), has_peer=False)
PREFILL_8B = _prefill("8b", LLAMA3_8B)
PREFILL_06B = _prefill("0.6b", QWEN3_06B)
PREFILL_4B = _prefill("4b", QWEN3_4B)
PREFILL_32B = _prefill("32b", QWEN3_32B)
VERIFICATION = _verification()
THROUGHPUT = _throughput()
PREFIX_CACHE = _prefix_cache()
