"""Which tests may notice a mutant, nearest first: those that a limit of time leaves out are the least likely ones."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Files and folders whose behaviour tests of other folders check. These run last.
_ELSEWHERE = {
    "gateway/dispatch": ["tests/integration"],
    "gateway/errors.py": ["tests/gateway/test_errors.py"],
    "gpu_worker/engine": ["tests/gpu_worker/execution"],
    "gpu_worker/execution": ["tests/gpu_worker/engine"],
    "gpu_worker/layers": ["tests/gpu_worker/models/test_logits.py", "tests/gpu_worker/models/test_recurrent_logits.py"],
    "gpu_worker/text/gguf_encoder": ["tests/gpu_worker/quantization/gguf/test_encoder_files.py"],
    "gpu_worker/text/template_sandbox.py": ["tests/security/test_chat_templates.py"],
}
# A mutant of a file that many import would meet the whole suite.
_MAX_IMPORTING_FILES = 12


class CoveringTests:
    """The test files of the tree by the modules that they import."""

    def __init__(self, root: Path) -> None:
        """Read the imports of all tests."""
        self._root = root
        self._importing: dict[str, set[str]] = defaultdict(set)
        for path in sorted((root / "tests").rglob("test_*.py")):
            for module in _imported(path):
                self._importing[module].add(str(path.relative_to(root)))

    def of(self, path: str, line: str) -> list[list[str]]:
        """Return the tests in stages: the mirrored files, those that import the module, and the mirrored folder's.

        Args:
            path: The file.
            line: What is changed. Tests of a stage that speak of more of its words come first.
        """
        folder, name = path.removesuffix(".py").rsplit("/", 1)
        mirrored = [f"tests/{folder}/test_{name}.py", *self._files(f"tests/{folder}", f"test_{name}_*.py")]
        module = path.removesuffix(".py").replace("/", ".")
        importing = sorted(self._importing[module], key=lambda test: (-_num_shared(test, path), test))
        words = _words(line)
        elsewhere = [test for part, tests in _ELSEWHERE.items() if path.startswith(part) for test in tests]
        stages: list[list[str]] = [[], [], []]
        seen: set[str] = set()
        for stage, tests in zip(
            stages,
            (mirrored, importing[:_MAX_IMPORTING_FILES], [*self._of_folder(f"tests/{folder}"), *elsewhere]),
            strict=True,
        ):
            new = [test for test in dict.fromkeys(tests) if test not in seen and (self._root / test).exists()]
            stage += sorted(new, key=lambda test: -len(words & self._words_of(test)))
            seen.update(stage)
        return [stage for stage in stages if stage]

    def _words_of(self, test: str) -> set[str]:
        """Return the words of a test file; of a folder there are none."""
        path = self._root / test
        return _words(path.read_text()) if path.is_file() else set()

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


def _words(text: str) -> set[str]:
    """Return the words of names and prose, of `has_summary` both."""
    return set(re.findall(r"[a-z]{4,}", text.lower()))


def _num_shared(test: str, path: str) -> int:
    """Count the leading folders that a test and a file share."""
    pairs = zip(test.split("/")[1:], path.split("/"), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
