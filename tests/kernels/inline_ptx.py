"""Runs the inline PTX of the kernels in Triton's interpreter, which has none: every instruction on all words at once.

Arithmetic is done in float64 and rounded once, as a fused multiply-add is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

Registers = dict[str, np.ndarray]
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_ptx(source: str, operands: list[np.ndarray], num_outputs: int) -> list[np.ndarray]:
    """Return the output registers, uint32; `operands` are the inputs, which follow the outputs in number."""
    registers = {f"${num_outputs + index}": operand for index, operand in enumerate(operands)}
    for statement in source.strip().strip("{}").split(";"):
        words = statement.replace(",", " ").split()
        if words and words[0] != ".reg":
            registers[words[1]] = _result(words[0], [_value(registers, word) for word in words[2:]])
    return [np.broadcast_to(registers[f"${index}"], operands[0].shape) for index in range(num_outputs)]


def _value(registers: Registers, word: str) -> np.ndarray:
    if re.fullmatch(r"0x[0-9a-f]+|\d+", word):
        return np.asarray(int(word, 0), dtype=np.uint32)
    return registers[word]


def _result(instruction: str, operands: list[np.ndarray]) -> np.ndarray:
    if instruction == "lop3.b32":
        return _lop3(*operands)
    if instruction.startswith("fma.rn."):
        return _fma(DTYPES[instruction.removeprefix("fma.rn.")], *operands)
    simple: dict[str, Callable[..., np.ndarray]] = {
        "mov.b32": lambda a: a, "and.b32": np.bitwise_and, "shr.u32": np.right_shift, "shl.b32": np.left_shift,
    }  # fmt: skip
    return simple[instruction](*operands)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit `4 a + 2 b + c` of the table, for the bits of the operands."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), dtype=np.uint32)
    for index in range(8):
        if int(table) >> index & 1:
            terms = (word if index & bit else ~word for word, bit in ((a, 4), (b, 2), (c, 1)))
            result |= np.bitwise_and.reduce(np.broadcast_arrays(*terms))
    return result


def _fma(dtype: torch.dtype, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    x, y, z = (_halves(word, dtype) for word in np.broadcast_arrays(a, b, c))
    # Products of two such numbers are exact in float64, and so are these sums: they are of few bits.
    rounded = (x * y + z).to(dtype).view(torch.int16)
    return rounded.numpy().view(np.uint32).reshape(np.broadcast_shapes(a.shape, b.shape, c.shape))


def _halves(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    halves = np.ascontiguousarray(words).reshape(-1).view(np.int16)
    return torch.from_numpy(halves.copy()).view(dtype).double()


class Results(NamedTuple):
    """What the builder of Triton's programs would return."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


@contextmanager
def interpreted_ptx() -> Iterator[None]:
    """Let the interpreter run assembly of two 16-bit elements a register."""
    from triton.runtime import interpreter

    def create(self: Any, source: str, constraints: str, values: list[Any], types: list[Any], *_: Any) -> Results:
        assert constraints == ",".join(["=r"] * len(types) + ["r"] * len(values))
        shape = values[0].data.shape
        operands = [np.ascontiguousarray(value.data).reshape(-1).view(np.uint32) for value in values]
        results = run_ptx(source, operands, len(types))
        scalars = [getattr(dtype, "scalar", dtype) for dtype in types]
        return Results(
            [
                interpreter.TensorHandle(result.view(interpreter._get_np_dtype(scalar)).reshape(shape), scalar)
                for result, scalar in zip(results, scalars, strict=True)
            ]
        )

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create)
        yield
