"""Every op's checks and cases once, at small shapes on the CPU: what a device run would find too late."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from kernels.activation.experts import SILU
from kernels.gated_delta import DeltaSizes
from kernels.paged_attention import is_expansion_less
from kernels.ssd import SsdSizes
from ops.bench.gpu.case import OURS, Case
from ops.bench.gpu.cases import attention, attention_batch, elementwise, experts, logits, quantized_linear, recurrent
from ops.bench.gpu.run import poisoned_memory
from ops.bench.gpu.shapes import DENSE_MODELS
from ops.bench.gpu.suites import all_suites
from tests.ops.bench.gpu.step.tiny_models import CPU
from tests.ops.bench.gpu.step.tiny_models import QWEN as TINY

TINY_SINKS = attention_batch.AttentionShape("tiny", 4, 2, 16, soft_cap=2.0, has_sinks=True)
TINY_LATENT = attention_batch.AttentionShape("tiny", 4, 1, 40, latent_dim=32, scale_dim=25)
TINY_ATTENTION = attention_batch.AttentionShape.of(TINY)
TINY_WINDOW = replace(TINY_ATTENTION, sliding_window=12)
TINY_SSD = SsdSizes(4, 9, 2, 12)
TINY_DELTA = DeltaSizes(2, 4, 12, 9)
TINY_EXPERTS = experts.MixtureSizes("tiny", 5, 2, 64, 32, SILU)
FLOAT8_EXPERTS = replace(TINY_EXPERTS, stored=experts.Stored.FP8)
CODED_EXPERTS = replace(TINY_EXPERTS, stored=experts.Stored.MXFP4)


ERRORS: dict[str, tuple[Callable[[], float], float]] = {
    "rms_norm": (partial(elementwise.rms_norm_error, CPU, 3, 65), 4e-3),
    "silu_mul": (partial(elementwise.silu_mul_error, CPU, 3, 65), 4e-3),
    "rotation": (partial(elementwise.rotation_error, CPU, TINY, 9), 4e-3),
    "sampling": (partial(logits.sampling_error, CPU, 6, 300, 1.0, 20, 0.9, 0.01), 0.0),
    "bitmask": (partial(logits.bitmask_error, CPU, 5, 301), 0.0),
    "attention": (partial(attention.attention_error, CPU, TINY_WINDOW, [(1, 40), (9, 9), (3, 17)]), 1e-2),
    "sinks": (partial(attention.attention_error, CPU, TINY_SINKS, [(1, 40), (9, 9), (3, 17)]), 1e-2),
    "latent": (partial(attention.attention_error, CPU, TINY_LATENT, [(1, 40), (9, 9), (3, 17)]), 1e-2),
    **{
        f"expanded {dtype}": (partial(attention.expanded_error, CPU, TINY_LATENT, [(12, 60), (9, 9)], dtype), 1e-2)
        for dtype in (torch.bfloat16, *attention.EIGHT_BITS)
    },
    "SSD": (partial(recurrent.recurrent_error, CPU, TINY_SSD, 3, 5), 1e-2),
    "gated delta": (partial(recurrent.recurrent_error, CPU, TINY_DELTA, 3, 5), 1e-2),
    "product": (partial(quantized_linear.product_error, CPU, 3, 40, 70), 4e-3),
    "int4": (partial(quantized_linear.linear_error, CPU, 3, 48, 160, quantized_linear.int4_weight), 4e-3),
    "int8": (partial(quantized_linear.linear_error, CPU, 3, 48, 160, quantized_linear.int8_weight), 4e-3),
    "fp8": (partial(quantized_linear.linear_error, CPU, 3, 48, 160, quantized_linear.fp8_weight), 4e-3),
    "fp8 blocks": (partial(quantized_linear.linear_error, CPU, 3, 260, 300, quantized_linear.fp8_block_weight), 4e-3),
    "experts": (partial(experts.experts_error, CPU, TINY_EXPERTS, 7), 6e-3),
    "coded experts": (partial(experts.experts_error, CPU, CODED_EXPERTS, 7), 1.5e-2),
    "float8 experts": (partial(experts.experts_error, CPU, FLOAT8_EXPERTS, 7), 1.5e-2),
}
CASES: dict[str, tuple[ModuleType, Callable[[], Case]]] = {
    "rms_norm": (elementwise, partial(elementwise.rms_norm_case, CPU, 3, 64)),
    "silu_mul": (elementwise, partial(elementwise.silu_mul_case, CPU, 3, 64)),
    "rotation": (elementwise, partial(elementwise.rotation_case, CPU, TINY, 9)),
    "sampling": (logits, partial(logits.sampling_case, CPU, 3, 300, 1.0)),
    "top_k": (logits, partial(logits.sampling_case, CPU, 3, 300, 1.0, 5, 0.9)),
    "bitmask": (logits, partial(logits.bitmask_case, CPU, 3, 300)),
    "decodes": (attention, partial(attention.attention_case, CPU, TINY_ATTENTION, [(1, 40)] * 3)),
    "chunk": (attention, partial(attention.attention_case, CPU, TINY_ATTENTION, [(40, 40)])),
    "mixed": (attention, partial(attention.attention_case, CPU, TINY_ATTENTION, [(10, 40), (1, 40)])),
    "sinks": (attention, partial(attention.variant_case, CPU, TINY_SINKS, [(1, 40)] * 3)),
    "latent": (attention, partial(attention.variant_case, CPU, TINY_LATENT, [(10, 40)])),
    "SSD decodes": (recurrent, partial(recurrent.recurrent_case, CPU, TINY_SSD, 3, 1)),
    "SSD prompts": (recurrent, partial(recurrent.recurrent_case, CPU, TINY_SSD, 2, 20)),
    "gated delta": (recurrent, partial(recurrent.recurrent_case, CPU, TINY_DELTA, 2, 20)),
    "product": (quantized_linear, partial(quantized_linear.product_case, CPU, 3, 40, 70)),
    "int4": (quantized_linear, partial(quantized_linear.INT4_OP.case, CPU, 3, 48, 160)),
    "int8": (quantized_linear, partial(quantized_linear.INT8_OP.case, CPU, 32, 48, 160)),
    "fp8": (quantized_linear, partial(quantized_linear.FP8_OP.case, CPU, 32, 48, 160)),
    "fp8 blocks": (quantized_linear, partial(quantized_linear.FP8_BLOCK_OP.case, CPU, 3, 260, 300)),
    "experts": (experts, partial(experts.experts_case, CPU, TINY_EXPERTS, 7)),
    "coded experts": (experts, partial(experts.experts_case, CPU, CODED_EXPERTS, 7)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_right_op_passes_its_check(name: str) -> None:
    error, tolerance = ERRORS[name]
    with poisoned_memory():
        assert 0 <= error() <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_of_a_case_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, build = CASES[name]
    if hasattr(module, "compiled"):
        monkeypatch.setattr(module, "compiled", lambda function: function)
    case = build()
    assert OURS in case.candidates
    assert case.num_bytes > 0
    outputs = {}
    for candidate, call in case.candidates.items():
        if candidate != "SDPA cuDNN":  # which has no CPU form
            outputs[candidate] = call(case.num_sets - 1)
    ours = outputs[OURS]
    if isinstance(ours, torch.Tensor) and ours.is_floating_point():
        for other in outputs.values():
            assert isinstance(other, torch.Tensor)
            assert other.numel() == ours.numel()


def test_baselines_compute_what_ours_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "compiled", lambda function: function)
    for build in (partial(elementwise.silu_mul_case, CPU, 3, 64), partial(elementwise.rotation_case, CPU, TINY, 9)):
        torch.manual_seed(0)
        ours = build().candidates[OURS](0)
        torch.manual_seed(0)
        theirs = build().candidates["torch.compile"](0)
        torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0.02)


def test_expanded_attention_is_checked_where_steps_expand() -> None:
    labels = [check.label for check in attention.ATTENTION_FORMS.checks(CPU)]
    assert set(attention.EXPANDED_CHECKED) < set(labels)
    assert {dtype for _, _, dtype in attention.EXPANDED_CHECKED.values()} == {torch.bfloat16, *attention.EIGHT_BITS}
    for shape, [(query_len, context_len)], _ in attention.EXPANDED_CHECKED.values():
        num_pairs = query_len * (2 * context_len - query_len + 1) // 2
        assert is_expansion_less(128, shape.latent_dim, 128, query_len, num_pairs, context_len)


def test_suites_have_distinct_short_labels_at_the_models_shapes() -> None:
    suites = all_suites()
    assert len({suite.name for suite in suites}) == len(suites)
    for suite in suites:
        labels = [spec.label for spec in suite.cases]
        assert len(set(labels)) == len(labels)
        assert max(map(len, labels)) <= 38
        assert len(suite.name) < 18
        for spec in suite.cases:
            inspect.signature(spec.case).bind(CPU, *spec.arguments)
        for check in suite.checks(CPU):
            inspect.signature(check.error).bind()
    assert {(model.hidden_size, model.vocab_size) for model in DENSE_MODELS} >= {(4096, 128_256), (5120, 151_936)}
