"""The sandbox in which chat templates run: Jinja's own, with a bound on how much a template may do.

Jinja's sandbox keeps templates from files and from the attributes of Python objects. It does not keep them from
computing for hours. Here every iteration of a loop, every call and every joined text counts as steps, and a rendering
has few seconds of its thread. Memory is bounded only in so far as it takes steps to fill: a model's directory is
trusted not to waste it, and so is a client whose own template the operator allows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
MAX_CPU_S = 5.0
STEPS_OF_A_CALL = 10
MAX_TEXT_CHARACTERS = 16 << 20

MAX_WIDTH = 1 << 16

_FILTERS_WITH_WIDTHS = ("batch", "center", "format", "indent", "slice", "wordwrap")
_METHODS_WITH_WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"])
# Each takes time linear in the text. A key in which brackets are nested is taken for a width.
_PERCENT = re.compile(r"%(?:\(([^)]*+)(?:\)|\Z))?([^a-zA-Z%]*+)")
_WIDE_BRACES = re.compile(r"\{[^{}:]*+:[^{}]*?\d{5}")
_NESTED_FORMAT = re.compile(r"\{[^{}]*\{")
_WIDTH = re.compile(r"\d{5}")


@dataclass(slots=True)
class _Budget:
    """What a rendering may still take. The clock is looked at once in a number of steps."""

    steps: int
    deadline: float


_budget: ContextVar[_Budget] = ContextVar("budget of the template that is being rendered")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates that raise `TemplateError` once they have taken too many steps."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, is_trusted: bool = True, **options: Any) -> None:
        """Take Jinja's own options. A template that is not trusted pays for filters, tests and comparisons too."""
        self._is_trusted = is_trusted
        super().__init__(**options)
        # It makes texts of any length.
        del self.globals["lipsum"]
        self.filters["_counted"] = _counted
        self.filters["_measured"] = _measured
        for name in _FILTERS_WITH_WIDTHS:
            self.filters[name] = _narrow(self.filters[name], is_format=name == "format")
        if not is_trusted:
            for functions in (self.filters, self.tests):
                functions |= {name: _paid(cast("Callable[..., Any]", each)) for name, each in functions.items()}

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Bound the text rendered within."""
        token = _budget.set(_Budget(MAX_STEPS, time.thread_time() + MAX_CPU_S))
        try:
            yield
        finally:
            _budget.reset(token)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a call; what a recursive loop is called with is looped over too."""
        _take_steps(STEPS_OF_A_CALL)
        if (name := getattr(obj, "__name__", "")) in _METHODS_WITH_WIDTHS:
            given = (*args, *kwargs.values())
            if name == "format_map":
                given = tuple(value for each in args if isinstance(each, Mapping) for value in each.values())
            check_widths(given)
            if name.startswith("format"):
                # The sandbox wraps `str.format`.
                _check_format(getattr(getattr(obj, "__wrapped__", obj), "__self__", None), given)
        if isinstance(obj, LoopContext) and args:
            args = (_counted(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that are too large before they are computed."""
        _take_steps(1)
        if operator == "%" and isinstance(left, str):
            check_widths(right if isinstance(right, tuple) and "*" in left else ())
            _check_format(left, ())
        if operator == "**" and not _is_small(left, right):
            raise jinja2.TemplateError("the power is too large")
        if operator == "*":
            _check_product(left, right)
        return _measured(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_counted")
        for holder in list(template.find_all(nodes.Node)):
            for field, value in list(holder.iter_fields()):
                is_paid = not self._is_trusted and isinstance(value, nodes.Compare)
                if is_paid or isinstance(value, nodes.Concat):
                    setattr(holder, field, _filtered(value, "_measured"))
        template.set_environment(self)
        return template


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _take_steps(count: int) -> None:
    budget = _budget.get()
    before = budget.steps
    budget.steps -= count
    if budget.steps < 0:
        raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")
    # Every sixteenth step.
    if before >> 4 != budget.steps >> 4 and time.thread_time() > budget.deadline:
        raise jinja2.TemplateError(f"it takes more than {MAX_CPU_S:g} s of computing")


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


def check_widths(values: Iterable[Any]) -> None:
    """Raise `TemplateError` if a number is no width that a text may be given."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise jinja2.TemplateError(f"the width {value} is larger than {MAX_WIDTH}")


def _check_format(form: Any, values: Iterable[Any]) -> None:
    """Refuse a form with large widths, also those that values are or hold, which stand in the forms of others."""
    if not isinstance(form, str):
        return
    is_wide = any("(" in (each[1] or "") or _WIDTH.search(each[2]) for each in _PERCENT.finditer(form))
    if not is_wide and _NESTED_FORMAT.search(form):
        is_wide = any(_may_be_wide(value) for value in values)
    if is_wide or _WIDE_BRACES.search(form):
        raise jinja2.TemplateError("a text is formatted too widely")


def _may_be_wide(value: Any) -> bool:
    return not isinstance(value, str | int | float) or _WIDTH.search(str(value)) is not None


def _narrow(function: Callable[..., Any], *, is_format: bool) -> Callable[..., Any]:
    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        check_widths((*args, *kwargs.values()))
        if is_format:
            _check_format(args[0], ())
        return function(*args, **kwargs)

    return apply


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        _take_steps(STEPS_OF_A_CALL)
        return _measured(function(*args, **kwargs))

    return apply


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > MAX_TEXT_CHARACTERS:
            raise jinja2.TemplateError(f"a text in it is longer than {MAX_TEXT_CHARACTERS} characters")
