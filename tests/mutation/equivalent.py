"""Mutants that do the same as the code, so that no test can notice them: read from `equivalent.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTED = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, slots=True)
class EquivalentMutant:
    """A change that makes no difference, and why.

    Attributes:
        path: The file, relative to the project.
        before: The lines that differ, joined to one, as they are.
        after: The same lines as the mutant has them.
    """

    path: str
    before: str
    after: str
    why: str

    def check(self, root: Path) -> None:
        """Look whether the code still has the lines.

        Raises:
            ValueError: It has not.
        """
        source = root / self.path
        lines = " ".join(map(str.strip, source.read_text().splitlines())) if source.exists() else ""
        if self.before not in lines:
            raise ValueError(f"{LISTED.name}: {self.path} has no line {self.before!r}; mend the entry")


def equivalent_mutants() -> list[EquivalentMutant]:
    """Read the list."""
    return [EquivalentMutant(**entry) for entry in tomllib.loads(LISTED.read_text())["mutant"]]
