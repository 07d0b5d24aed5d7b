"""Semantic mutants: mistakes that keep the code plausible, such as a guard left out or the neighbouring variable."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from ops.mutation.mutant import Edit, SourceFile

_JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# Calls that bound another value: the mutant leaves out the bound.
_BOUNDING = {"min": range(2), "max": range(2), "wait_for": range(1), "shield": range(1)}
# What mypy says of a call without an argument that it needs or that binds a name, and of another class's field. A tuple
# of another length is refused in many ways.
_CRASHES = {
    "argument": ("[call-arg]", "[call-overload]", "[name-defined]"),
    "element": ("]",),
    "variable": ("[attr-defined]",),
}


def is_crash(operator: str, type_error: str) -> bool:
    """Whether a mutant raises an error wherever it runs, by the operator that made it and mypy's complaint."""
    return type_error.endswith(_CRASHES.get(operator, ()))


def semantic_edits(file: SourceFile, node: ast.AST) -> Iterator[Edit]:
    """Yield the semantic edits of one node; `variables` has those that need types."""
    match node:
        case (
            ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()) | ast.Set(elts=elements)
        ):
            yield from _without_element(file, node, elements)
        case ast.Call():
            yield from _without_argument(file, node)
            yield from _without_bound(file, node)
        case ast.BoolOp(values=values):
            for left_out in range(len(values)):
                kept = [b"(" + file.text_of(value) + b")" for place, value in enumerate(values) if place != left_out]
                joined = (b" and " if isinstance(node.op, ast.And) else b" or ").join(kept)
                yield _replaced(file, "guard", node, b"(" + joined + b")")
        case ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            yield _replaced(file, "branch", test, b"not (" + file.text_of(test) + b")")
        case ast.With() | ast.AsyncWith() | ast.Try():
            yield from _protection_edits(file, node)


def _protection_edits(file: SourceFile, node: ast.With | ast.AsyncWith | ast.Try) -> Iterator[Edit]:
    """Remove an unnamed context manager, an exception handler or a `finally` block."""
    if isinstance(node, ast.Try):
        for body in (*(handler.body for handler in node.handlers), *([node.finalbody] if node.finalbody else [])):
            span = file.span(body[0])[0], file.span(body[-1])[1]
            yield Edit("guard", ((*span, b"pass" if body is node.finalbody else b"raise"),))
        return
    for item in node.items:
        if item.optional_vars is None:
            yield _replaced(file, "guard", item.context_expr, b'__import__("contextlib").nullcontext()')


def block_edits(file: SourceFile, block: list[ast.stmt], is_of_function: bool) -> Iterator[Edit]:
    """Yield the semantic edits of the statements of one block."""
    for place, statement in enumerate(block):
        following = block[place + 1] if place + 1 < len(block) else None
        if isinstance(statement, ast.If):
            yield from _condition_edits(file, statement, following is not None or is_of_function)
        elif isinstance(statement, ast.Raise | ast.Continue | ast.Break):
            yield _replaced(file, "return", statement, b"pass")
        elif _has_effect(statement):
            yield _replaced(file, "call", statement, b"pass")
        if following is not None and is_order_visible(statement, following):
            first, second = file.span(statement), file.span(following)
            yield Edit("exchange", ((*first, file.text[slice(*second)]), (*second, file.text[slice(*first)])))


def _condition_edits(file: SourceFile, statement: ast.If, is_early: bool) -> Iterator[Edit]:
    test = statement.test
    yield _replaced(file, "branch", test, b"not (" + file.text_of(test) + b")")
    if statement.orelse:
        return
    if isinstance(statement.body[-1], _JUMPS):
        if is_early:
            yield _replaced(file, "return", statement, b"pass")
    elif not any(isinstance(each, ast.NamedExpr) for each in ast.walk(test)):
        yield _replaced(file, "guard", test, b"True")


def is_order_visible(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether exchanging two statements may change what they do without a name that is not bound yet."""
    if isinstance(first, _JUMPS) or isinstance(second, _JUMPS):
        return False
    compound = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass
    if isinstance(first, compound) or isinstance(second, compound) or _is_docstring(first):
        return False
    if _bound(first) & _read(second) or _bound(second) & _read(first):
        return False
    if _changed(first) & (_read(second) | _changed(second)) or _changed(second) & _read(first):
        return True
    return _acts(first) and _acts(second)


def _bound(statement: ast.stmt) -> set[str]:
    return {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _read(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a statement reads, as text."""
    loads = (each for each in ast.walk(statement) if isinstance(each, ast.Name | ast.Attribute))
    return {ast.unparse(each) for each in loads if isinstance(each.ctx, ast.Load)}


def _changed(statement: ast.stmt) -> set[str]:
    """Return the attributes and containers that a statement writes, as text."""
    changed = set()
    for each in ast.walk(statement):
        if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
            changed.add(ast.unparse(each.value if isinstance(each, ast.Subscript) else each))
    return changed


def _acts(statement: ast.stmt) -> bool:
    """Whether a statement calls something for its effect, waits, or ends the block early."""
    if isinstance(statement, ast.Expr):
        return not _is_docstring(statement)
    return any(isinstance(each, (ast.Await, ast.Yield, *_JUMPS)) for each in ast.walk(statement))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _has_effect(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Expr(value=ast.Await(value=ast.Call())) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
    return False


def _without_element(file: SourceFile, node: ast.expr, elements: list[ast.expr]) -> Iterator[Edit]:
    for left_out in range(0 if isinstance(node, ast.Tuple) and len(elements) < 2 else len(elements)):
        kept = [file.text_of(each) for place, each in enumerate(elements) if place != left_out]
        text = b", ".join(kept)
        if isinstance(node, ast.Tuple):
            text = b"(" + text + (b",)" if len(kept) == 1 else b")")
        else:
            text = b"[" + text + b"]" if isinstance(node, ast.List) or not kept else b"{" + text + b"}"
        yield _replaced(file, "element", node, text)


def _without_argument(file: SourceFile, call: ast.Call) -> Iterator[Edit]:
    """Leave out a keyword or the last positional argument: without an earlier one all others would move."""
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    for left_out in arguments[max(0, len(call.args) - 1) :]:
        kept = b", ".join(file.text_of(each) for each in arguments if each is not left_out)
        opening = file.text.index(b"(", file.span(call.func)[1])
        yield Edit("argument", ((opening, file.span(call)[1], b"(" + kept + b")"),))


def _without_bound(file: SourceFile, call: ast.Call) -> Iterator[Edit]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if len(call.args) in (1, 2) and not call.keywords:
        for place in _BOUNDING.get(name, ()):
            if place < len(call.args) and not isinstance(call.args[place], ast.Starred | ast.GeneratorExp):
                yield _replaced(file, "guard", call, b"(" + file.text_of(call.args[place]) + b")")


def _replaced(file: SourceFile, name: str, node: ast.expr | ast.stmt, new: bytes) -> Edit:
    return Edit(name, ((*file.span(node), new),))


_LOGGERS = ("_log", "_logger", "_log_limit")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def fields_of(owner: ast.ClassDef) -> dict[str, str]:
    """Return the annotations of a class's attributes, those that its methods assign from annotated parameters too."""
    fields = dict(_annotated(owner.body))
    for method in owner.body:
        if isinstance(method, Function):
            parameters = _parameters(method)
            for node in ast.walk(method):
                match node:
                    case ast.AnnAssign(target=ast.Attribute(value=ast.Name("self"), attr=name), annotation=annotation):
                        fields[name] = ast.unparse(annotation)
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name("self"), attr=name)], value=ast.Name(given)):
                        if given in parameters:
                            fields.setdefault(name, parameters[given])
    return fields


def variable_edits(
    file: SourceFile, function: Function, outer: Mapping[str, str], attributes: Mapping[str, str]
) -> Iterator[Edit]:
    """Yield the edits of a function's own code, by the annotations of outer functions' variables and of `self`."""
    variables = {**outer, **scope_of(function)}
    for node in _own_nodes(function):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in variables:
                alternatives = _same_type(name, variables)
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Load()) if name in attributes:
                alternatives = [f"self.{other}" for other in _same_type(name, attributes)]
            case _:
                continue
        for other in alternatives:
            yield Edit("variable", ((*file.span(node), other.encode()),))


def scope_of(function: Function) -> dict[str, str]:
    """Return the annotations of a function's parameters and annotated local variables."""
    return {**_parameters(function), **dict(_annotated(_own_nodes(function)))}


def is_logging(node: ast.AST) -> bool:
    """Whether a node is a call of a logger, which is prose."""
    if isinstance(node, ast.Expr):
        return is_logging(node.value)
    function = node.func if isinstance(node, ast.Call) else None
    logger = function.value if isinstance(function, ast.Attribute) else None
    return (logger.attr if isinstance(logger, ast.Attribute) else getattr(logger, "id", None)) in _LOGGERS


def _same_type(name: str, types: Mapping[str, str]) -> list[str]:
    return sorted(other for other, annotation in types.items() if other != name and annotation == types[name])


def _parameters(function: Function) -> dict[str, str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}


def _annotated(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield a function's nodes without annotations, nested functions and prose: f-strings and log calls."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.JoinedStr | ast.Lambda) or is_logging(node):
            continue
        yield node
        left_out = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting += [child for child in ast.iter_child_nodes(node) if child is not left_out]
