"""Semantic mutants that replace a variable or attribute by another one with the same annotation."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from ops.mutation.mutant import Edit, SourceFile

_LOGGERS = ("_log", "_logger", "_log_limit")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def fields_of(owner: ast.ClassDef) -> dict[str, str]:
    """Return the annotations of a class's attributes, those that its methods assign from annotated parameters too."""
    fields = dict(_annotated(owner.body))
    for method in owner.body:
        if isinstance(method, _Function):
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
    file: SourceFile, function: _Function, outer: Mapping[str, str], attributes: Mapping[str, str]
) -> Iterator[Edit]:
    """Yield the edits of a function's own code.

    Args:
        file: The file.
        function: The function.
        outer: Annotations of the variables of enclosing functions.
        attributes: Annotations of the attributes of `self`.
    """
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


def scope_of(function: _Function) -> dict[str, str]:
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


def _parameters(function: _Function) -> dict[str, str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}


def _annotated(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """Yield a function's nodes without annotations, nested functions and prose: f-strings and log calls."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.JoinedStr | ast.Lambda) or is_logging(node):
            continue
        yield node
        left_out = node.annotation if isinstance(node, ast.AnnAssign) else None
        waiting += [child for child in ast.iter_child_nodes(node) if child is not left_out]
