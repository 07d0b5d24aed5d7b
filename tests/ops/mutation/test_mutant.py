"""The lists of mutants name code and tests that are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ops.mutation.mutant import SeriousMutant, equivalent_mutants, serious_mutants

ROOT = Path(__file__).resolve().parents[3]


def test_equivalent_mutants_are_of_lines_that_are_there() -> None:
    entries = equivalent_mutants()
    for entry in entries:
        source = ROOT / entry.path
        lines = " ".join(map(str.strip, source.read_text().splitlines())) if source.exists() else ""
        assert entry.before in lines, f"equivalent.toml: {entry.path} has no line {entry.before!r}; mend the entry"
        assert entry.why
    assert len(set(entries)) == len(entries)


def test_serious_mutants_are_valid_changes_and_name_tests_that_are_there() -> None:
    for entry in serious_mutants():
        changed = entry.source(ROOT)
        assert changed != (ROOT / entry.path).read_text()
        ast.parse(changed)
        assert entry.breaks
        assert entry.tests
        for test in entry.tests:
            path, *names = test.split("::")
            assert f" {names[-1]}(" in (ROOT / path).read_text() or names[-1] == "runTest"


def test_serious_mutant_of_a_line_that_is_gone_is_refused() -> None:
    entry = SeriousMutant("Nothing.", "gateway/config.py", "def no_such_function() -> None:", "", ["tests"])
    with pytest.raises(ValueError, match="0 times, not once"):
        entry.source(ROOT)
