"""What became of each mutant, kept in a folder, so that a sample can be tried in pieces and counted as one.

The folder holds the copies of the tree as well, and which tests run which lines: it is of one state of the code. Tests
may be added between the pieces.
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutant import Mutant


class Verdict(enum.StrEnum):
    """What became of a mutant."""

    TESTS = "tests"
    TIME = "time"
    TYPES = "types"
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"


@dataclass(slots=True)
class Count:
    """How many mutants of a file or room became what."""

    tests: int = 0
    time: int = 0
    types: int = 0
    survived: int = 0
    equivalent: int = 0

    def add(self, verdict: Verdict, number: int = 1) -> None:
        setattr(self, verdict, getattr(self, verdict) + number)

    def add_all(self, other: Count) -> None:
        for verdict in Verdict:
            self.add(verdict, getattr(other, verdict))

    @property
    def num_noticed(self) -> int:
        return self.tests + self.time + self.types

    @property
    def num_tested(self) -> int:
        return self.num_noticed + self.survived


class KeptVerdicts:
    """The verdicts in a folder, by room, path and change."""

    def __init__(self, folder: Path) -> None:
        """Read those of earlier pieces."""
        self._file = folder / "verdicts.jsonl"
        rows = map(json.loads, self._file.read_text().splitlines()) if self._file.exists() else ()
        self._known = {tuple(row["mutant"]): Verdict(row["verdict"]) for row in rows}

    def of(self, room: str, mutant: Mutant) -> Verdict | None:
        """Return what an earlier piece found."""
        return self._known.get((room, mutant.path, mutant.before, mutant.after))

    def keep(self, room: str, mutant: Mutant, verdict: Verdict, test: str | None) -> None:
        """Add a verdict and the test that noticed."""
        row = {"mutant": (room, mutant.path, mutant.before, mutant.after), "verdict": verdict, "test": test}
        with self._file.open("a") as file:
            file.write(json.dumps({**row, "line": mutant.lines.start}) + "\n")


def claim(folder: Path, root: Path, paths: list[str]) -> None:
    """Take a folder for one state of these files.

    Raises:
        SystemExit: It is of another state.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.encode() + b"\0" + hashlib.sha256((root / path).read_bytes()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "code.sha256"
    if mark.exists() and mark.read_text() != digest.hexdigest():
        raise SystemExit(
            f"--keep {folder} is of another state of the code; give a new folder, or go back to that state"
        )
    mark.write_text(digest.hexdigest())
