"""Generated pages are current, and the site has every page."""

from __future__ import annotations

import re

import yaml

from ops.docs_site.configuration import page
from ops.docs_site.other_options import page as other_options
from tests.architecture.source import ROOT

DOCS = ROOT / "ops" / "docs"


def test_configuration_page_is_current() -> None:
    current = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page() == current, "run: python -m ops.docs_site.configuration > ops/docs/configuration.md"


def test_every_page_is_in_the_sites_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load((ROOT / "ops" / "mkdocs.yml").read_text())["nav"])))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")}
    assert pages - named == set()
    assert [name for name in named if not (DOCS / name).exists()] == []


def test_page_of_other_servers_options_is_current() -> None:
    current = (DOCS / "other-options.md").read_text(encoding="utf-8")
    assert other_options() == current, "run: python -m ops.docs_site.other_options > ops/docs/other-options.md"


def test_every_page_that_is_read_from_top_to_bottom_ends_with_where_to_go() -> None:
    made = {"api.md", "clients.md", "configuration.md", "metrics.md", "models.md", "other-options.md", "parameters.md"}
    pages = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md") if page.name not in made}
    endings = {name: re.split(r"^## ", text, flags=re.MULTILINE)[-1] for name, text in pages.items()}
    assert [name for name, ending in endings.items() if not re.search(r"\]\([\w./-]+\.md\)", ending)] == []
