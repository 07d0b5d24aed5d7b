"""The Python files of the packages, parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "gpu_worker", "shared", "kernels", "ops")


def python_files(*tops: str) -> list[Path]:
    """Return the Python files below these folders of the repository, caches left out."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, node: ast.stmt | ast.expr) -> str:
    """Return `file:line` of a node, to be clicked at."""
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def dotted_name(function: ast.expr) -> str | None:
    """Return `a.b` of a name's attribute, `a` of a name; it takes no time, as `ast.unparse` does."""
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(owner), name):
            return f"{owner}.{name}"
    return None
