"""Tuning with a scripted timer and results from the CPU."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.activation import triton_kernel as activation
from kernels.activation.triton_kernel import SiluMulConfig
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.rms_norm import triton_kernel as rms_norm
from kernels.rms_norm.triton_kernel import RmsNormConfig
from kernels.rope_kv_write import triton_kernel as rope
from kernels.rope_kv_write.triton_kernel import RopeConfig
from ops.bench.gpu.case import OURS, Case, Clock, Entry, Op, Shapes, sizes
from ops.bench.gpu.cases import attention_batch, elementwise, logits, quantized_linear
from ops.bench.gpu.timer import Timing
from ops.bench.gpu.tune import __main__ as command
from ops.bench.gpu.tune import tables
from ops.bench.gpu.tune.__main__ import TABLES, tune
from ops.bench.gpu.tune.choice import Tuning, choose
from tests.ops.bench.gpu.step.tiny_models import CPU
from tests.ops.bench.gpu.step.tiny_models import QWEN as TINY

TINY_ATTENTION = attention_batch.AttentionShape.of(TINY)
PRESENT, SLOW, FAST, WRONG = ({"width": width} for width in (1, 2, 3, 4))
SECONDS = {1: (4e-6, 4e-6), 2: (9e-6, 3e-6), 3: (3e-6, 4e-6), 4: (1e-6, 1e-6)}


class ToldTimer:
    """Takes what the call returns for its time."""

    def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
        seconds = call(num_sets - 1)
        return Timing(seconds if isinstance(seconds, float) else 1.0, 0.0, is_graphed=True)


def error(device: torch.device, *shape: object, entry: Entry) -> float:
    return 0.5 if entry == WRONG else 0.0


def make_case(device: torch.device, place: int) -> Case:
    return Case(0, 0, 3, {OURS: lambda _, entry: SECONDS[entry["width"]][place]})


OP = Op(error, make_case, 0.1)


def make_tuning(key: int | None = 64, candidates: tuple[Entry, ...] = (SLOW, FAST, WRONG), op: Op = OP) -> Tuning:
    return Tuning(
        "WIDTHS",
        key,
        lambda _: PRESENT,
        candidates,
        op,
        {"small": ()},
        {f"problem {place}": (place,) for place in range(2)},
    )


def test_fastest_right_entry_is_chosen_and_a_wrong_one_never() -> None:
    choice = choose(make_tuning(), PRESENT, CPU, ToldTimer())
    assert choice.entry == FAST
    failures = {trial.entry["width"]: trial.failure for trial in choice.trials}
    assert failures == {1: None, 2: None, 3: None, 4: "wrong at small: 5.00e-01 of 1e-01"}


@pytest.mark.parametrize("wrong", [float("nan"), None], ids=["nan", "raises"])
def test_entry_without_a_right_result_is_out(wrong: float | None) -> None:
    def error(device: torch.device, entry: Entry) -> float:
        if entry == FAST and wrong is None:
            raise RuntimeError("out of resource: shared memory")
        return wrong if entry == FAST and wrong is not None else 0.0

    tuning = make_tuning(candidates=(SLOW, FAST), op=replace(OP, error=error))
    choice = choose(tuning, PRESENT, CPU, ToldTimer())
    assert choice.entry == PRESENT
    assert choice.trials[2].failure is not None


def test_entry_that_fails_at_a_timed_shape_is_out() -> None:
    def case(device: torch.device, place: int) -> Case:
        def call(index: int, entry: Entry) -> float:
            if entry == FAST and place == 1:
                raise RuntimeError("too large")
            return SECONDS[entry["width"]][0]

        return Case(0, 0, 1, {OURS: call})

    choice = choose(make_tuning(op=replace(OP, case=case)), PRESENT, CPU, ToldTimer())
    assert choice.entry == PRESENT
    assert (choice.trials[2].failure or "").startswith("problem 1: RuntimeError: too large (call:")


def test_present_entry_stays_where_another_is_hardly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, 3, (3.98e-6, 3.98e-6))
    assert choose(make_tuning(candidates=(FAST,)), PRESENT, CPU, ToldTimer()).entry == PRESENT


def test_no_right_entry_at_all_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"WIDTHS\[64\]: no entry is right; the present one: wrong at small"):
        choose(make_tuning(candidates=()), WRONG, CPU, ToldTimer())


def test_entries_are_decided_until_time_is_up_and_what_follows_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(make_tuning(), op=replace(OP, error=lambda device, entry: 1.0))
    tunings = {"widths": (make_tuning(64), make_tuning(128)), "wrong": (wrong,)}
    monkeypatch.setattr(command, "TABLES", tunings)
    monkeypatch.setattr(command, "gpu_of", lambda _: Gpu(GpuGeneration.HOPPER, 132))
    monkeypatch.setattr(command, "_FOLLOWING", {"widths": lambda device, timer, entries: {"ROWS": sorted(entries)}})
    assert tune("widths", CPU, ToldTimer(), time.monotonic() + 60)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  chosen    1.155  width=3: 3.0 4.0"
    assert lines[2].startswith("  present   1.333  width=1")
    assert lines[4] == "              inf  width=4: wrong at small: 5.00e-01 of 1e-01"
    assert lines[-1] == "ROWS HOPPER: [64, 128]"
    assert not tune("widths", CPU, ToldTimer(), time.monotonic() - 1)
    assert not tune("wrong", CPU, ToldTimer(), time.monotonic() + 60)
    assert "no entry is right" in capsys.readouterr().out


def small(tuning: Tuning, checked: Shapes, timed: Shapes) -> Tuning:
    """Return a tuning of two candidates at other shapes."""
    return replace(tuning, candidates=tuning.candidates[:2], checked=checked, timed=timed)


def small_product(tuning: Tuning, size: int) -> Tuning:
    return small(tuning, sizes((16, 40, size), (3, 13, 128)), {"qkv": (16, 40, size)})


def small_attention(tuning: Tuning, lengths: list[tuple[int, int]]) -> Tuning:
    dtypes = [shape[2] for shape in tuning.checked.values()]
    checked = {str(dtype): (TINY_ATTENTION, lengths, dtype) for dtype in dtypes}
    return small(tuning, checked, {"some": (TINY_ATTENTION, lengths)})


REAL_TUNINGS: dict[str, Tuning] = {
    "split": small_attention(tables.SPLIT_ATTENTION[0], [(1, 40), (1, 3)]),
    "split_8bit": small_attention(tables.SPLIT_ATTENTION_8BIT[0], [(1, 40), (1, 3)]),
    "chunk": small_attention(tables.CHUNK_ATTENTION[0], [(9, 20)]),
    "int4": small_product(tables.PACKED_LINEAR[0], 256),
    "fp8": small_product(tables.SCALED_LINEAR[0], 128),
    "rms_norm": small(tables.RMS_NORM, sizes((3, 40), (1, 7)), sizes((3, 40))),
    "silu_mul": small(tables.SILU_MUL, sizes((3, 40), (1, 7)), sizes((3, 40))),
    "rope_kv_write": small(tables.ROPE_KV_WRITE, {"tiny": (TINY, 5)}, {"tiny": (TINY, 5)}),
    "sampling": small(
        tables.SAMPLING,
        {name: (3, 300, *shape[2:]) for name, shape in tables.SAMPLING.checked.items()},
        {name: (3, 300, *shape[2:]) for name, shape in tables.SAMPLING.timed.items()},
    ),
}


@pytest.mark.parametrize("name", REAL_TUNINGS)
def test_checks_and_problems_of_each_op_run(name: str) -> None:
    tuning = REAL_TUNINGS[name]
    choice = choose(tuning, {**tuning.candidates[0]}, CPU, ToldTimer())
    assert [trial.failure for trial in choice.trials] == [None] * len(choice.trials)
    assert len(choice.trials[0].seconds) == len(tuning.timed)


def test_entry_with_a_wrong_result_is_seen_by_the_checks_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    product = quantized_linear.form_linear_reference
    monkeypatch.setattr(logits, "sample_tokens", lambda logits, *_, **__: logits.argmin(dim=-1))
    monkeypatch.setattr(attention_batch, "paged_attention", lambda query, *_, **__: query * 0.5)
    monkeypatch.setattr(quantized_linear, "form_linear_reference", lambda x, matrix: product(x, matrix) * 1.1)
    monkeypatch.setattr(elementwise, "rms_norm", lambda x, weight, eps, residual: x * weight)
    monkeypatch.setattr(elementwise, "gated", lambda gate_up, activation: gate_up.chunk(2, dim=-1)[0])
    monkeypatch.setattr(elementwise, "rope_kv_write", lambda qkv, *_: qkv[:, : TINY.num_heads])
    for tuning in REAL_TUNINGS.values():
        with pytest.raises(RuntimeError, match="no entry is right; the present one: wrong at"):
            choose(tuning, tuning.candidates[0], CPU, ToldTimer())


def test_quantized_kernel_is_ahead_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class RowsTimer(ToldTimer):
        def measure(self, call: Callable[[int], object], num_sets: int, clock: Clock = Clock.GRAPH) -> Timing:
            rows, is_ours = call(0)
            return Timing(0.9 if is_ours and rows <= 64 else 1.0, 0.0, is_graphed=True)

    served: list[tuple[int, int]] = []

    def ours(x: torch.Tensor, matrix: object, entry: Entry, max_rows: int) -> tuple[int, bool]:
        served.append((len(x), max_rows))
        assert entry == {"width": max_rows}
        return len(x), True

    monkeypatch.setattr(quantized_linear, "multiply", ours)
    entries = {limit: {"width": limit} for limit in (16, 64, 128)}
    for timer, last in ((RowsTimer(), 64), (ToldTimer(), 0)):
        ahead = tables.quantized_ahead_until(
            CPU, timer, entries, quantized_linear.int4_weight, lambda x, matrix: (len(x), False), (40, 128),
            (8, 64, 256),
        )  # fmt: skip
        assert ahead == last
    assert served[:3] == [(8, 16), (64, 64), (256, 128)]


def test_candidates_fit_the_configurations_that_they_are_for() -> None:
    for tuning in (tuning for tunings in TABLES.values() for tuning in tunings):
        for generation in GpuGeneration:
            assert tuning.present(generation).keys() == tuning.candidates[0].keys()
        present = tuning.present(GpuGeneration.HOPPER)
        assert len(tuning.candidates) <= 30
        for candidate in tuning.candidates:
            assert candidate.keys() == present.keys(), tuning.label
        for check in tuning.op.checks(CPU, tuning.checked, entry=present):
            inspect.signature(check.error).bind()
        for spec in tuning.op.cases(tuning.timed):
            inspect.signature(spec.case).bind(CPU, *spec.arguments)


def test_present_entries_are_those_that_the_kernels_have() -> None:
    hopper = GpuGeneration.HOPPER
    assert RmsNormConfig(**tables.RMS_NORM.present(hopper)) == rms_norm.CONFIG
    assert SiluMulConfig(**tables.SILU_MUL.present(hopper)) == activation.CONFIG
    assert RopeConfig(**tables.ROPE_KV_WRITE.present(hopper)) == rope.CONFIG
    assert tables.SPLIT_ATTENTION[0].present(hopper)["block_n"] == 64
    # A table without an entry for this many rows takes its largest.
    *_, of_64, of_128 = tables.PACKED_LINEAR
    assert of_128.present(GpuGeneration.AMPERE) == of_64.present(GpuGeneration.AMPERE)
