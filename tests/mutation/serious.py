"""`make mutants ARGS=--serious`: mutants that break a promise, listed in `serious.toml`, against the tests named there.

A sample rarely holds them, so they are always tried. Each has to be noticed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.judge import Judge, Turns

LISTED = Path(__file__).with_name("serious.toml")


@dataclass(frozen=True, slots=True)
class SeriousMutant:
    """A change of a file, and the tests of which one has to fail with it."""

    breaks: str
    path: str
    before: str
    after: str
    tests: list[str]

    def source(self, root: Path) -> str:
        """Return the changed text of the file.

        Raises:
            ValueError: The file does not hold `before` exactly once.
        """
        source = (root / self.path).read_text()
        if (count := source.count(self.before)) != 1:
            raise ValueError(f"{LISTED.name}: {self.path} has {self.before!r} {count} times, not once; mend the entry")
        return source.replace(self.before, self.after)


def serious_mutants() -> list[SeriousMutant]:
    """Read the list."""
    return [SeriousMutant(**entry) for entry in tomllib.loads(LISTED.read_text())["mutant"]]


def run(copy: Path, wanted: str) -> Iterator[tuple[SeriousMutant, str | None]]:
    """Try the mutants whose path begins with `wanted`, in a copy of the tree; say with each which test failed."""
    judge = Judge(copy, Turns())
    for mutant in serious_mutants():
        if mutant.path.startswith(wanted):
            notice = judge.notice(mutant.path, mutant.source(copy), mutant.tests)
            yield mutant, None if notice is None else notice.test
    judge.close()
