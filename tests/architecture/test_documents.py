"""The pages that people read: links lead somewhere, and a number names one decision."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.source import ROOT

DECISIONS = sorted((ROOT / "ops" / "decisions").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "ops").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_decisions_are_numbered_without_gaps_or_doubles() -> None:
    assert [path.name[:4] for path in DECISIONS] == [f"{number:04}" for number in range(1, len(DECISIONS) + 1)]


def test_title_of_a_decision_begins_with_its_number() -> None:
    titles = {path: path.read_text(encoding="utf-8").split("\n", 1)[0] for path in DECISIONS}
    assert [title for path, title in titles.items() if not title.startswith(f"# {path.name[:4]} · ")] == []


def test_relative_links_lead_to_files() -> None:
    assert _broken_links(PAGES) == []


def test_pages_say_how_many_cells_of_clients_work_as_the_table_does() -> None:
    table = (ROOT / "ops" / "docs" / "clients.md").read_text(encoding="utf-8")
    found = re.search(r"^(\d+ of (\d+)) cells work", table, re.MULTILINE)
    assert f"[{found[1]} cells of tested clients]" in (ROOT / "README.md").read_text(encoding="utf-8")
    coming = (ROOT / "ops" / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert f" {found[2]} cells of libraries" in coming


def _broken_links(pages: list[Path]) -> list[str]:
    return [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
