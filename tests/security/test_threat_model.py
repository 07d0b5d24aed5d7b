"""The page of threats names tests that exist, and every file of this folder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.source import ROOT

PAGE = ROOT / "ops" / "docs" / "threat-model.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_named_tests_exist() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_attack_names_a_test_that_shows_what_happens() -> None:
    rows = PAGE.read_text(encoding="utf-8").split("\n## What an attacker")[1]
    attacks = [row for row in rows.split("\n") if row.startswith("| ") and not row.startswith("| attack")]
    assert [row for row in attacks if not NAMED.search(row)] == []


def test_every_file_of_this_folder_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert {name for name in files if f"tests/security/{name}::" not in text} == set()
