"""Easy mutants: a changed constant, comparison, arithmetic operator, argument or assignment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ops.mutation.mutant import Edit, SourceFile

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "/",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_BOUNDARIES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_TIME = re.compile(r"(?:.*_)?(?:now|at|s|until|since|deadline)")


def easy_edits(file: SourceFile, node: ast.AST) -> Iterator[Edit]:
    """Yield the easy edits of one node."""
    yield from _value_edits(file, node)
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            if not (isinstance(operator, _BOUNDARIES) and _names_a_time(node)):
                yield _joined(file, "comparison", node, left, _COMPARISONS[type(operator)], right)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            yield _joined(file, "arithmetic", node, left, _ARITHMETIC[type(operator)], right)
        case ast.AugAssign(target=target, op=operator, value=value) if type(operator) in _ARITHMETIC:
            new = f"{ast.unparse(target)} {_ARITHMETIC[type(operator)]}= {ast.unparse(value)}"
            yield _replaced(file, "arithmetic", node, new)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _replaced(file, "comparison", node, f"bool({ast.unparse(operand)})")


def _value_edits(file: SourceFile, node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=value):
            if (new_value := _other_constant(value)) is not None:
                yield _replaced(file, "constant", node, repr(new_value))
        case ast.Call(args=args, keywords=keywords):
            for argument in (*args, *(keyword.value for keyword in keywords if keyword.arg)):
                if not isinstance(argument, ast.Starred | ast.Constant | ast.GeneratorExp):
                    yield _replaced(file, "none", argument, "None")
        case ast.Assign(value=value) if not isinstance(value, ast.Constant):
            yield _replaced(file, "none", value, "None")


def _names_a_time(comparison: ast.Compare) -> bool:
    """Whether times are compared: no clock tells whether the very moment belongs to a period."""
    return any(isinstance(each, ast.Name) and _TIME.fullmatch(each.id) for each in ast.walk(comparison))


def _other_constant(value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str() if value and " " not in value:
            return f"XX{value}XX"
    return None


def _joined(file: SourceFile, name: str, node: ast.expr, left: ast.expr, operator: str, right: ast.expr) -> Edit:
    """Replace the operator between two operands, and keep their text and parentheses."""
    between = file.span(left)[1], file.span(right)[0]
    text = file.text[slice(*between)]
    before, after = text[: len(text) - len(text.lstrip(b" )\n"))], text[len(text.rstrip(b" (\n")) :]
    return Edit(name, ((*between, before + operator.encode() + after),))


def _replaced(file: SourceFile, name: str, node: ast.expr | ast.stmt, new: str) -> Edit:
    return Edit(name, ((*file.span(node), new.encode()),))
