"""A source file, its mutants as edits of its text, and the list of mutants that change nothing."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_LISTS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces byte ranges of a file, in order and without overlap: what an operator proposes."""

    operator: str
    pieces: tuple[tuple[int, int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file.

    Attributes:
        source: Its whole changed text.
        before: The lines that differ, joined to one line without indentation; `after` is the same lines in the mutant.
        line: Number of the first line that differs.
    """

    path: str
    source: str
    operator: str
    before: str
    after: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.operator})\n    - {self.before}\n    + {self.after}"


class SourceFile:
    """A parsed file with the byte ranges of its nodes."""

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.text = (root / path).read_bytes()
        self.tree = ast.parse(self.text)
        self._line_starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return the byte range of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(self, node: ast.expr | ast.stmt | ast.keyword) -> bytes:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def mutant(self, edit: Edit) -> Mutant | None:
        """Apply an edit; None if the result is no Python or the same program."""
        parts, position = [], 0
        for start, end, new in edit.pieces:
            parts += [self.text[position:start], new]
            position = end
        changed = b"".join([*parts, self.text[position:]]).decode()
        try:
            tree = ast.parse(changed)
        except SyntaxError:
            return None
        if ast.dump(tree) == self._dump:
            return None
        return Mutant(self.path, changed, edit.operator, *_difference(self.text.decode(), changed))

    @cached_property
    def _dump(self) -> str:
        return ast.dump(self.tree)


def _difference(before: str, after: str) -> tuple[str, str, int]:
    """Return the lines that were taken out, those that were put in, each joined to one line, and the first's number."""
    old, new = before.splitlines(), after.splitlines()
    start = next((index for index, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    removed, added = old[start : len(old) - end], new[start : len(new) - end]
    return " ".join(map(str.strip, removed)), " ".join(map(str.strip, added)), start + 1


@dataclass(frozen=True, slots=True)
class EquivalentMutant:
    """A change without effect, which no test can notice, and the reason (`equivalent.toml`)."""

    path: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True)
class SeriousMutant:
    """A change that breaks a promise, and the tests of which one has to fail with it (`serious.toml`)."""

    breaks: str
    path: str
    before: str
    after: str
    tests: list[str]

    def source(self, root: Path) -> str:
        """Return the changed text of the file; `ValueError` if the file does not hold `before` exactly once."""
        source = (root / self.path).read_text()
        if (count := source.count(self.before)) != 1:
            raise ValueError(f"serious.toml: {self.path} has {self.before!r} {count} times, not once; mend the entry")
        return source.replace(self.before, self.after)


def equivalent_mutants() -> list[EquivalentMutant]:
    """Read the list."""
    return [EquivalentMutant(**entry) for entry in tomllib.loads((_LISTS / "equivalent.toml").read_text())["mutant"]]


def serious_mutants() -> list[SeriousMutant]:
    """Read the list."""
    return [SeriousMutant(**entry) for entry in tomllib.loads((_LISTS / "serious.toml").read_text())["mutant"]]
