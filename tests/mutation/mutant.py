"""One mutant of a file, as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file.

    Attributes:
        path: The file, relative to the project.
        source: Its whole changed text.
        before: The lines that differ, without indentation, as they are.
        after: The same lines as the mutant has them; empty where a statement is left out.
        lines: The numbers of those lines in the file as it is.
    """

    path: str
    source: str
    before: str
    after: str
    lines: range

    def __str__(self) -> str:
        return f"{self.path}:{self.lines.start}\n    - {self.before}\n    + {self.after}"
