"""The sandbox in which chat templates run: Jinja's own, with a bound on how much a template may do.

Jinja's sandbox keeps templates from files and from the attributes of Python objects. It does not keep them from
computing for hours. Here every iteration of a loop, every call and every joined text counts as steps. Memory is bounded
only in so far as it takes steps to fill: a model's directory is trusted not to waste it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
STEPS_OF_A_CALL = 10
MAX_TEXT_CHARACTERS = 16 << 20

MAX_WIDTH = 1 << 16

_FILTERS_WITH_WIDTHS = ("center", "format", "indent", "wordwrap")
_METHODS_WITH_WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "format"])
_WIDE_FORMAT = re.compile(r"(%[^a-zA-Z%]*|\{[^{}]*:[^{}]*)\d{5}")

_steps_left: ContextVar[list[int]] = ContextVar("steps of the template that is being rendered")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates that raise `TemplateError` once they have taken too many steps."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        """Take Jinja's own options."""
        super().__init__(**options)
        self.filters["_counted"] = _counted
        self.filters["_measured"] = _measured
        for name in _FILTERS_WITH_WIDTHS:
            self.filters[name] = _narrow(self.filters[name])

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Bound what is rendered within."""
        token = _steps_left.set([MAX_STEPS])
        try:
            yield
        finally:
            _steps_left.reset(token)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a call; what a recursive loop is called with is looped over too."""
        _take_steps(STEPS_OF_A_CALL)
        if getattr(obj, "__name__", "") in _METHODS_WITH_WIDTHS:
            # The sandbox wraps `str.format`.
            _check_widths((getattr(getattr(obj, "__wrapped__", obj), "__self__", None), *args))
        if isinstance(obj, LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that are too large before they are computed."""
        _take_steps(1)
        if operator == "%" and isinstance(left, str):
            _check_widths([left])
        if operator == "**" and not _is_small(left, right):
            raise jinja2.TemplateError("the power is too large")
        if operator == "*":
            _check_product(left, right)
        return _measured(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and count its loops and its joined texts."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_counted")
        for holder in list(template.find_all(nodes.Node)):
            for field, value in list(holder.iter_fields()):
                if isinstance(value, nodes.Concat):
                    setattr(holder, field, _filtered(value, "_measured"))
        template.set_environment(self)
        return template


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _take_steps(count: int) -> None:
    left = _steps_left.get()
    left[0] -= count
    if left[0] < 0:
        raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _take_steps(1)
        yield value


def _measured(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_TEXT_CHARACTERS:
        raise jinja2.TemplateError(f"a text in it is longer than {MAX_TEXT_CHARACTERS} characters")
    return value


def _is_small(base: Any, exponent: Any) -> bool:
    return bool(abs(base) <= MAX_WIDTH and abs(exponent) <= 1 << 6)


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_WIDTH:
            raise jinja2.TemplateError(f"the width {value} is larger than {MAX_WIDTH}")
        if isinstance(value, str) and _WIDE_FORMAT.search(value):
            raise jinja2.TemplateError("a text is formatted too widely")


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is not applied with large widths."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        _check_widths((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return apply


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > MAX_TEXT_CHARACTERS:
            raise jinja2.TemplateError(f"a text in it is longer than {MAX_TEXT_CHARACTERS} characters")
