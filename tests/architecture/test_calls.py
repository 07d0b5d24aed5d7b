"""Calls that run what they read are not made anywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGES, dotted_name, parsed, place, python_files

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "yaml.load", "marshal.loads"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve"}


def _files_with(*words: str) -> Iterator[Path]:
    """Yield the files that a word stands in: parsing all of them takes seconds."""
    any_word = re.compile(rf"\b({'|'.join(words)})\b")
    return (path for path in python_files(*PACKAGES) if any_word.search(path.read_text()))


def test_nothing_evaluates_or_unpickles() -> None:
    found = []
    for path in _files_with(*FORBIDDEN_IMPORTS, *(name.rpartition(".")[2] for name in FORBIDDEN_CALLS)):
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
