"""Makes Triton's interpreter faster, without a change to what it computes.

Most of what the interpreter of Triton 3.6 takes goes into four things: integer sums and products are computed a second
time in 64 bits for a check whose result is thrown away unless kernels are debugged, the table of NumPy's types is made
anew for each value, and so are the objects that stand for its shape, and the arguments of each call are copied one by
one.
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
    _share_shapes(monkeypatch)


def _share_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of one shape have the same objects for it: nothing changes them."""
    import triton.language.core as tl

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = of_types[sizes]
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    monkeypatch.setattr(tl.block_type, "__init__", init_type)
    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)
