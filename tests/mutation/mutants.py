"""Mutants of a source file: each is the file with one small change that a test should notice.

Most changes are mutmut's operators (comparisons, constants, arguments, assignments). Two are ours, since they are the
mistakes that tests missed most often: a statement that is left out, and a condition that is turned around. Prose is
not mutated (log lines, messages, docstrings), nor are the defaults of settings, which are choices, nor whether the very
moment belongs to a period (`<` for `<=` between times): no clock tells it twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import libcst as cst
from mutmut.mutation.file_mutation import create_mutations, deep_replace

from tests.mutation.mutant import Mutant

_BOUNDARIES = {
    (cst.LessThan, cst.LessThanEqual),
    (cst.LessThanEqual, cst.LessThan),
    (cst.GreaterThan, cst.GreaterThanEqual),
    (cst.GreaterThanEqual, cst.GreaterThan),
}
_TIME = re.compile(r"(?:.*_)?(?:now|at|s|until|since|deadline)")
# Methods that begin a task, whose name is for logs.
_STARTING = ("every", "spawn", "start")
_LOGGERS = ("_log", "_logger", "_log_limit")


class MutantSource:
    """All mutants of one file, rendered when they are asked for: a file has hundreds."""

    def __init__(self, root: Path, path: str) -> None:
        """Read the file `path`, which is relative to `root`."""
        self.path = path
        self._source = (root / path).read_text()
        self._module, mutations, _, _ = create_mutations(path, self._source)
        ignored = _prose(self._module) | _defaults(self._module)
        changes = [(m.original_node, m.mutated_node) for m in mutations if m.contained_by_top_level_function]
        changes += _OwnOperators.of(self._module)
        moments = _comparisons_of_times(self._module)
        self._changes = [
            (node, mutated)
            for node, mutated in changes
            if node not in ignored and not (node in moments and _is_boundary(node, mutated))
        ]

    def __len__(self) -> int:
        return len(self._changes)

    def mutant(self, index: int) -> Mutant:
        """Return one mutant. Two indices may give the same change."""
        changed = cast("cst.Module", deep_replace(self._module, *self._changes[index])).code
        return Mutant(self.path, changed, *_difference(self._source, changed))


class _OwnOperators(cst.CSTVisitor):
    """Leaves out statements that change something, and turns conditions around."""

    def __init__(self) -> None:
        self.changes: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    @classmethod
    def of(cls, module: cst.Module) -> list[tuple[cst.CSTNode, cst.CSTNode]]:
        visitor = cls()
        module.visit(visitor)
        return visitor.changes

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        for statement in _statements(node):
            if len(statement.body) == 1 and _has_effect(statement.body[0]):
                self.changes.append((statement, statement.with_changes(body=[cst.Pass()])))

    def visit_If(self, node: cst.If) -> None:
        test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        self.changes.append((node.test, cst.UnaryOperation(cst.Not(), test)))


def _statements(function: cst.FunctionDef) -> Iterator[cst.SimpleStatementLine]:
    for node in _walk(function.body):
        if isinstance(node, cst.SimpleStatementLine):
            yield node


def _has_effect(statement: cst.BaseSmallStatement) -> bool:
    if isinstance(statement, cst.Expr):
        value = statement.value.expression if isinstance(statement.value, cst.Await) else statement.value
        return isinstance(value, cst.Call)
    if isinstance(statement, cst.Assign):
        return all(isinstance(target.target, cst.Attribute | cst.Subscript) for target in statement.targets)
    return isinstance(statement, cst.AugAssign | cst.Raise | cst.Del)


def _prose(module: cst.Module) -> set[cst.CSTNode]:
    """Return the nodes of log calls, f-strings, strings with a space and names of tasks, with all that they hold."""
    prose: set[cst.CSTNode] = set()
    for node in _walk(module):
        is_text = isinstance(node, cst.SimpleString) and " " in node.value
        if is_text or isinstance(node, cst.FormattedString | cst.ConcatenatedString) or _is_logging(node):
            prose.update(_walk(node))
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _STARTING:
            prose.update(each.value for each in node.args[1:] if isinstance(each.value, cst.SimpleString))
        if isinstance(node, cst.If) and node.orelse is None and all(map(_is_logging, node.body.body)):
            prose.update(_walk(node.test))
    return prose


def _comparisons_of_times(module: cst.Module) -> set[cst.CSTNode]:
    """Return the comparisons in which a time is named: what follows their first value."""
    targets: set[cst.CSTNode] = set()
    for node in _walk(module):
        if isinstance(node, cst.Comparison) and any(
            isinstance(each, cst.Name) and _TIME.fullmatch(each.value) for each in _walk(node)
        ):
            targets.update(node.comparisons)
    return targets


def _is_boundary(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether only the very moment of a comparison is another one in the mutant."""
    if not isinstance(node, cst.ComparisonTarget) or not isinstance(mutated, cst.ComparisonTarget):
        return False
    return (type(node.operator), type(mutated.operator)) in _BOUNDARIES


def _defaults(module: cst.Module) -> set[cst.CSTNode]:
    """Return the nodes of the fields of classes, their defaults included."""
    classes = [node for node in _walk(module) if isinstance(node, cst.ClassDef)]
    lines = [line for each in classes for line in each.body.body if isinstance(line, cst.SimpleStatementLine)]
    return {node for line in lines for node in _walk(line)}


def _is_logging(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.SimpleStatementLine):
        return len(node.body) == 1 and isinstance(node.body[0], cst.Expr) and _is_logging(node.body[0].value)
    function = node.func if isinstance(node, cst.Call) else None
    logger = function.value if isinstance(function, cst.Attribute) else None
    name = logger.attr if isinstance(logger, cst.Attribute) else logger
    return isinstance(name, cst.Name) and name.value in _LOGGERS


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _difference(before: str, after: str) -> tuple[str, str, range]:
    """Return the lines that were taken out and those that were put in, joined to one line each, and where."""
    old, new = before.splitlines(), after.splitlines()
    start = next((index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    removed, added = old[start : len(old) - end], new[start : len(new) - end]
    lines = range(start + 1, start + 1 + max(1, len(removed)))
    return " ".join(map(str.strip, removed)), " ".join(map(str.strip, added)), lines
