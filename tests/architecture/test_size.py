"""A file is one room, a function fits on a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT, parsed, place, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 120
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "stuff"}


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of code, without signature and docstring, which are long where they should be."""
    assert function.end_lineno is not None
    code = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - code[0].lineno + 1 if code else 0


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions below a node; expressions, which are most of a tree, have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from _functions(child)


def _limit(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = ROOT / "kernels" in path.parents and any("jit" in ast.dump(mark) for mark in function.decorator_list)
    return MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files(*PACKAGES)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    too_long = {}
    for path in python_files(*PACKAGES):
        for node in _functions(parsed(path)):
            if (lines := _body_lines(node)) > MAX_FUNCTION_LINES and lines > _limit(path, node):
                too_long[f"{place(path, node)} {node.name}"] = lines
    assert too_long == {}


def test_no_module_has_a_vague_name() -> None:
    assert [str(path) for path in python_files(*PACKAGES) if path.stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_is_for() -> None:
    files = [path for path in python_files(*PACKAGES) if path.read_text().strip()]
    assert [str(path.relative_to(ROOT)) for path in files if not ast.get_docstring(parsed(path))] == []
