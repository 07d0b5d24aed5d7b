"""Which tests may notice a mutant, nearest first: those that a limit of time leaves out are the least likely ones."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# A mutant of a file that many import would meet the whole suite.
_MAX_IMPORTING_FILES = 12


class CoveringTests:
    """The test files of the tree by the modules that they import."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._importing: dict[str, set[str]] = defaultdict(set)
        for path in sorted((root / "tests").rglob("test_*.py")):
            for module in _imported(path):
                self._importing[module].add(str(path.relative_to(root)))

    def of(self, path: str) -> list[list[str]]:
        """Return the tests of a file in stages: the mirrored ones, those that import it, and the mirrored folder's."""
        folder, name = path.removesuffix(".py").rsplit("/", 1)
        mirrored = [f"tests/{folder}/test_{name}.py", *self._files(f"tests/{folder}", f"test_{name}_*.py")]
        importing = sorted(
            self._importing[path.removesuffix(".py").replace("/", ".")],
            key=lambda test: (-_num_shared(test, path), test),
        )
        stages, seen = [], set[str]()
        for tests in (mirrored, importing[:_MAX_IMPORTING_FILES], self._of_folder(f"tests/{folder}")):
            stages.append([test for test in tests if test not in seen and (self._root / test).exists()])
            seen.update(stages[-1])
        return [stage for stage in stages if stage]

    def _of_folder(self, folder: str) -> list[str]:
        """Return the test files of a folder, or of the nearest folder around it that has some."""
        found: list[str] = []
        while not found and "/" in folder:
            found = self._files(folder, "test_*.py")
            folder = folder.rpartition("/")[0]
        return found

    def _files(self, folder: str, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self._root)) for path in (self._root / folder).glob(pattern))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _num_shared(test: str, path: str) -> int:
    """Count the leading folders that a test and a file share."""
    pairs = zip(test.split("/")[1:], path.split("/"), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
