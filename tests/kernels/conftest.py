"""Where the Triton kernels of the tests run: on a GPU, or in the interpreter; and on how many threads others do."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kernels.cpu_library import CpuLibrary, cpu_library
from tests.kernels.inline_ptx import interpreted_ptx


def speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter faster until `monkeypatch` takes it back, without a change to what it computes.

    Most of what the interpreter of Triton 3.6 takes goes into four things: integer sums and products are computed a
    second time in 64 bits for a check whose result is thrown away unless kernels are debugged, the table of NumPy's
    types is made anew for each value, and so are the objects that stand for its shape, and the arguments of each call
    are copied one by one.
    """
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


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one, else the CPU, where kernels run in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    return library


@pytest.fixture
def assembly_runs() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else interpreted_ptx():
        yield


@pytest.fixture(scope="module", autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let compiled kernels share out their work; the arrays of the interpreter are too small for that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.module.__name__.endswith("_triton") else 2)
    yield
    torch.set_num_threads(before)


def take_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter of Triton 3.6 loop to a bound that was loaded, which numpy 2.4 refuses.

    It holds scalars as arrays of one element, and those no longer turn into integers by themselves.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def round_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter of Triton 3.6 carry into the exponent when it rounds to fp8, as GPUs and torch do."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert_float = interpreter._convert_float

    def convert(values: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if (from_type, to_type) != (tl.float32, tl.float8e4nv):
            return convert_float(values, from_type, to_type, rounding)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a kernel calls find the language as it was patched for the kernel.

    The interpreter of Triton 3.6 patches it again for every call, which takes longer than most calls.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang

    def patch(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_patched = not any(tl.core.is_builtin(language.load) for language in seen)
        return interpreter._LangPatchScope() if is_patched else patch_lang(function)

    monkeypatch.setattr(interpreter, "_patch_lang", patch)


@pytest.fixture(scope="session", autouse=True)
def patched_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if importlib.util.find_spec("triton") is not None:
            for change in (take_loop_bounds, round_to_fp8, speed_up, patch_once):
                change(monkeypatch)
        yield
