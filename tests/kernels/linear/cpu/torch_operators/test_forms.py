"""torch's packed operators against float64 arithmetic on the numbers that a matrix stands for, and the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.linear.cpu.torch_operators import (
    Int4Form,
    Int8ConvertedForm,
    Int8Form,
    RowForms,
    TokenInt8Form,
    choose,
    describe,
    measure,
)
from kernels.linear.cpu.torch_operators.form import Form, UnsupportedMatrixError
from kernels.linear.cpu.torch_operators.timing import ROWS
from kernels.linear.forms import INT4, GroupQuantizedWeight, ScaledWeight
from kernels.linear.reference import form_linear_reference, quantize_tokens

# Weights, scales or inputs are rounded to the type, then the result.
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests need not know how fast a matrix is read from memory, nor wait for threads that others hold up."""
    monkeypatch.setattr("kernels.linear.cpu.torch_operators.timing._FLUSHED_BYTES", 4096)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int4(
    outputs: int, inputs: int, group_size: int, offset: str = "symmetric", *, is_ordered: bool = False
) -> GroupQuantizedWeight:
    """Make a matrix with an outlier and a group of zeros, and offsets as one of the checkpoint formats has them."""
    random, shape = generator(inputs), (outputs, inputs // group_size)
    values = torch.randint(256, (outputs, inputs // 2), generator=random).to(torch.uint8)
    scales = (torch.rand(shape, generator=random) * 0.02 + 0.001).half().float()
    scales[0, 0] *= 256
    scales[1, -1] = 0
    if offset == "symmetric":
        offsets = -8 * scales
    elif offset == "zeros":
        offsets = -scales * torch.randint(16, shape, generator=random)
    else:
        offsets = torch.randn(shape, generator=random) * 0.1
    order = torch.randperm(inputs, generator=random) if is_ordered else None
    return GroupQuantizedWeight(values, INT4, group_size, scales, offsets, order)


def int8(outputs: int, inputs: int, activation: str = "none", *, has_one_scale: bool = False) -> ScaledWeight:
    random = generator(outputs)
    values = (torch.randn(outputs, inputs, generator=random) * 40).clamp(-128, 127).to(torch.int8)
    scales = torch.rand(1 if has_one_scale else outputs, 1, generator=random) * 0.01
    scale = torch.tensor(0.03) if activation == "static" else None
    return ScaledWeight(values, scales, activation, scale)  # type: ignore[arg-type]


def inputs_with_outliers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=generator(rows))
    x[:, 3] *= 20
    x[0, :40] = 0
    return x.to(dtype)


def check(form: Form, x: torch.Tensor, given: torch.Tensor, matrix: torch.Tensor) -> None:
    result = form(x)
    assert result.dtype is x.dtype
    exact = given.double() @ matrix.double().T
    size = given.double().abs() @ matrix.double().abs().T
    assert ((result.double() - exact).abs() <= EPSILON[x.dtype] * size).all()


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("offset", ["symmetric", "zeros", "free"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size"),
    [(1, 16, 64, 32), (5, 48, 192, 64), (3, 80, 384, 128), (70, 64, 512, 256)],
)
def test_int4_groups_equal_exact_product(
    rows: int, outputs: int, inputs: int, group_size: int, offset: str, dtype: torch.dtype
) -> None:
    weight, x = int4(outputs, inputs, group_size, offset), inputs_with_outliers(rows, inputs, dtype)
    matrix = weight.dequantize()
    check(Int4Form(weight, dtype), x, x, matrix)


def test_int4_columns_follow_the_order_of_the_input() -> None:
    weight, x = int4(32, 128, 32, is_ordered=True), inputs_with_outliers(3, 128, torch.float32)
    matrix = weight.dequantize()
    check(Int4Form(weight, torch.float32), x, x, matrix)


def test_int4_of_refused_sizes_raises() -> None:
    with pytest.raises(RuntimeError):
        Int4Form(int4(37, 64, 32), torch.bfloat16)
    with pytest.raises(RuntimeError):
        Int4Form(int4(16, 64, 16), torch.bfloat16)(torch.ones(1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("has_one_scale", [False, True])
@pytest.mark.parametrize("kind", [Int8Form, Int8ConvertedForm])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 64), (7, 96, 416), (66, 64, 128)])
def test_int8_equals_exact_product(
    rows: int, outputs: int, inputs: int, kind: Callable[..., Form], has_one_scale: bool, dtype: torch.dtype
) -> None:
    weight, x = int8(outputs, inputs, has_one_scale=has_one_scale), inputs_with_outliers(rows, inputs, dtype)
    check(kind(weight, dtype), x, x, weight.values.double() * weight.scales.double())


@pytest.mark.parametrize("shape", [(37, 64), (36, 64), (64, 200)])
def test_int8_of_sizes_that_the_operator_reads_beyond_raises(shape: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedMatrixError, match="multiples of 32"):
        Int8Form(int8(*shape), torch.bfloat16)


def skip_where_bytes_saturate() -> None:
    """Some processors add products of bytes in 16 bits: there, the form is found to be wrong when it is measured."""
    weight = ScaledWeight(torch.full((1, 64), 127, dtype=torch.int8), torch.ones(1, 1), "dynamic")
    if TokenInt8Form(weight)(torch.ones(1, 64)).item() < 127 * 64:
        pytest.skip("this processor has no exact products of bytes")


def test_products_that_saturate_are_found() -> None:
    weight = int8(96, 256, "static")
    exact = TokenInt8Form(weight)

    def saturating(x: torch.Tensor) -> torch.Tensor:
        return exact(x).clamp(max=exact(torch.full((1, 256), 3.8)).max().item() / 2)

    def formula(x: torch.Tensor) -> torch.Tensor:
        return form_linear_reference(x, weight)

    makers: dict[str, Callable[[], Form]] = {"saturating": lambda: saturating}
    assert set(measure(makers, formula, 256, torch.float32, largest_input=0.03 * 127)) == {"formula"}


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("has_one_scale", [False, True])
@pytest.mark.parametrize("activation", ["dynamic", "static"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 37, 201), (70, 64, 1024)])
def test_rounded_inputs_equal_exact_product_of_what_they_round_to(
    rows: int, outputs: int, inputs: int, activation: str, has_one_scale: bool, dtype: torch.dtype
) -> None:
    skip_where_bytes_saturate()
    weight = int8(outputs, inputs, activation, has_one_scale=has_one_scale)
    x = (torch.randn(rows, inputs, generator=generator(0)) * 2).to(dtype)
    x[0, : inputs // 2] = 0
    values, scales = quantize_tokens(x, weight.activation_scale)
    check(TokenInt8Form(weight), x, values.double() * scales.double(), weight.values.double() * weight.scales.double())


def test_row_of_zeros_and_not_a_number_stay_what_they_are() -> None:
    x = torch.zeros(2, 64)
    x[1, 3] = math.nan
    result = TokenInt8Form(int8(32, 64, "dynamic"))(x)
    assert (result[0] == 0).all()
    assert result[1].isnan().all()


def test_forms_that_fail_or_are_wrong_are_left_out() -> None:
    weight = int8(32, 64)

    def formula(x: torch.Tensor) -> torch.Tensor:
        return form_linear_reference(x, weight)

    def missing() -> Form:
        return torch.ops.aten.no_such_operator  # type: ignore[no-any-return]

    def refused() -> Form:
        raise RuntimeError("expect N to be dividable by 16")

    makers: dict[str, Callable[[], Form]] = {
        "right": lambda: formula,
        "missing": missing,
        "refused": refused,
        "wrong": lambda: lambda x: formula(x) * 1.02,
        "not a number": lambda: lambda x: formula(x) * math.nan,
    }
    assert set(measure(makers, formula, 64, torch.float32)) == {"right"}


def test_matrix_without_a_form_is_left_to_the_formula() -> None:
    seconds = measure({}, lambda x: x, 32, torch.bfloat16)
    assert list(seconds) == ["formula"]
    assert choose(seconds) == ("formula",) * len(ROWS)


def test_hopeless_form_is_not_measured_with_more_rows() -> None:
    weight, calls = int8(32, 64), list[int]()

    def slow(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        for _ in range(20_000 // len(x)):
            x = x.clone()
        return form_linear_reference(x, weight)

    def formula(x: torch.Tensor) -> torch.Tensor:
        return form_linear_reference(x, weight)

    seconds = measure({"slow": lambda: slow, "fast": lambda: formula}, formula, 64, torch.float32)
    assert seconds["slow"] == (math.inf,) * len(ROWS)
    assert max(calls) < ROWS[-1]


@pytest.mark.parametrize(
    ("packed", "dense", "chosen"),
    [
        ((1, 1, 3, 9), (2, 2, 2, 3), "packed packed dense dense"),
        ((2, 2, 2, 2), (2, 2, 2, 3), "packed packed packed packed"),
        ((1.9, 2, 9, 9), (2, 2, 2, 3), "dense dense dense dense"),
        ((1, math.inf, math.inf, math.inf), (4, 4, 4, 4), "packed dense dense dense"),
    ],
)
def test_another_form_is_held_only_where_it_is_much_better(
    packed: tuple[float, ...], dense: tuple[float, ...], chosen: str
) -> None:
    seconds = {"packed": packed, "dense": dense}
    assert choose(seconds) == tuple(chosen.split())
    assert describe(choose(seconds), seconds).startswith(chosen.replace(" ", "/"))


def test_larger_form_must_be_worth_its_memory() -> None:
    seconds = {"packed": (5.0, 5.0, 5.0, 6.0), "dense": (4.5, 4.5, 4.5, 4.5)}
    assert set(choose(seconds)) == {"dense"}
    assert choose(seconds, larger=("dense",)) == ("packed", "packed", "packed", "dense")


def test_rows_go_to_the_form_that_was_measured_nearest() -> None:
    forms = RowForms(tuple((lambda x, number=number: torch.tensor(number)) for number in ROWS))  # type: ignore[misc]
    nearest = {rows: int(forms(torch.empty(rows, 1))) for rows in (1, 2, 3, 8, 9, 32, 33, 512)}
    assert nearest == {1: 1, 2: 1, 3: 4, 8: 4, 9: 16, 32: 16, 33: 64, 512: 64}
