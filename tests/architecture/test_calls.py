"""Calls that run what they read are not made anywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.source import PACKAGES, dotted_name, parsed, place, python_files

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "yaml.load", "marshal.loads"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve"}


def _files_with(*names: str, calls: Iterable[str] = ()) -> Iterator[Path]:
    """Yield the files that one of these names stands in, or a call of one: parsing all of them takes seconds."""
    any_name = re.compile(
        "|".join([rf"\b{name}\b" for name in names] + [rf"(?<![\w.]){re.escape(call)}\(" for call in calls])
    )
    return (path for path in python_files(*PACKAGES) if any_name.search(path.read_text()))


def test_nothing_evaluates_or_unpickles() -> None:
    found = []
    for path in _files_with(*FORBIDDEN_IMPORTS, calls=FORBIDDEN_CALLS):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and dotted_name(node.func) in FORBIDDEN_CALLS:
                found.append(f"{place(path, node)} {ast.unparse(node.func)}")
            elif isinstance(node, ast.Import | ast.ImportFrom) and _imported(node) & FORBIDDEN_IMPORTS:
                found.append(f"{place(path, node)} {ast.unparse(node)}")
    assert found == []


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return {name.split(".")[0] for name in names}


def test_no_process_is_started_through_a_shell() -> None:
    found = [
        place(path, node)
        for path in _files_with("shell")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False"
    ]
    assert found == []
