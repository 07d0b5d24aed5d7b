"""A launch table as a file: a Python module of nothing but literals, read without running it and written back whole."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

_LINE_LENGTH = 120

Literal = Any


class TableFile:
    """The docstring and the assignments of one module."""

    def __init__(self, source: str) -> None:
        """Read a module.

        Raises:
            ValueError: It holds more than a docstring and assignments of literals.
        """
        docstring, *statements = ast.parse(source).body
        self._docstring = ast.get_source_segment(source, docstring)
        self.tables: dict[str, Literal] = {}
        self._heads: dict[str, str] = {}
        for statement in statements:
            if not isinstance(statement, ast.AnnAssign) or statement.value is None:
                raise ValueError(f"line {statement.lineno} is not `name: type = literal`: {ast.unparse(statement)}")
            name = ast.unparse(statement.target)
            self._heads[name] = f"{name}: {ast.unparse(statement.annotation)} = "
            self.tables[name] = ast.literal_eval(statement.value)

    @classmethod
    def read(cls, path: Path) -> TableFile:
        """Read a file."""
        return cls(path.read_text())

    def text(self) -> str:
        """Return the module as the project's formatter leaves it."""
        lines = [self._head_and_literal(name, value) for name, value in self.tables.items()]
        return f"{self._docstring}\n\n" + "\n".join(lines) + "\n"

    def _head_and_literal(self, name: str, value: Literal) -> str:
        return self._heads[name] + format_literal(value, 0, len(self._heads[name]))


def format_literal(value: Literal, indent: int, used: int) -> str:
    """Return a literal; a dictionary is on one line where it holds no other and fits, else has a line an entry.

    Args:
        value: Dictionaries, tuples, strings and numbers.
        indent: Columns before the line that the literal begins on.
        used: Columns of that line before the literal.
    """
    if not isinstance(value, dict):
        return _scalar(value)
    flat = "{" + ", ".join(f"{_scalar(key)}: {_scalar(item)}" for key, item in value.items()) + "}"
    is_flat = not any(isinstance(item, dict) for item in value.values())
    has_comma = indent > 0
    if is_flat and used + len(flat) + has_comma <= _LINE_LENGTH:
        return flat
    inner = indent + 4
    lines = ["{"]
    for key, item in value.items():
        head = f"{' ' * inner}{_scalar(key)}: "
        lines.append(f"{head}{format_literal(item, inner, len(head))},")
    return "\n".join([*lines, " " * indent + "}"])


def _scalar(value: Literal) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)
