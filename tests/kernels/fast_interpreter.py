"""Makes Triton's interpreter faster, without a change to what it computes.

Most of what the interpreter of Triton 3.6 takes goes into three things: integer sums and products are computed a second
time in 64 bits for a check whose result is thrown away unless kernels are debugged, the table of NumPy's types is made
anew for each value, and the arguments of each call are copied one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter until `monkeypatch` takes it back."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder, numpy_type = interpreter.interpreter_builder, interpreter._get_np_dtype
    assert not builder.options.debug, "the check of overflows would be heard"
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    known: dict[str, Any] = {}

    def known_numpy_type(of: Any) -> Any:
        if isinstance(of, tl.block_type):
            of = of.element_ty
        if isinstance(of, tl.pointer_type):
            return numpy_type(of)
        if of.name not in known:
            known[of.name] = numpy_type(of)
        return known[of.name]

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*arguments, **named)

        scope.set_attr(owner, name, call)

    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_get_np_dtype", known_numpy_type)
    monkeypatch.setattr(interpreter, "_patch_attr", patch_attribute)
