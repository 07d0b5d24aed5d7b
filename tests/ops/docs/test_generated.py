"""Generated pages are current, and the site has every page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import yaml

from gpu_worker.start.config import WorkerConfig
from ops.docs_site.configuration import page
from tests.architecture.source import ROOT

DOCS = ROOT / "ops" / "docs"


def test_configuration_page_is_current() -> None:
    current = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert "| `--idle-s` |" in current, "options without a variable stand there too"
    assert page(current) == current, "run: python -m ops.docs_site.configuration ops/docs/configuration.md"


def test_every_page_is_in_the_sites_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load((ROOT / "ops" / "mkdocs.yml").read_text())["nav"])))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")}
    assert pages - named == set()
    assert [name for name in named if not (DOCS / name).exists()] == []


def test_no_page_opens_with_how_it_is_made() -> None:
    openings = {page.name: " ".join(page.read_text(encoding="utf-8").split("\n\n")[:3]) for page in DOCS.glob("*.md")}
    made = re.compile(r"python -m|do not edit|[Gg]enerated from", re.MULTILINE)
    assert [name for name, opening in openings.items() if made.search(opening)] == []


def test_sites_style_keeps_names_of_options_whole() -> None:
    settings = yaml.safe_load((ROOT / "ops" / "mkdocs.yml").read_text())
    style = "".join((DOCS / file).read_text() for file in settings["extra_css"])
    assert re.search(r"td:first-child code,[^}]*white-space: nowrap", style, re.DOTALL)


def test_front_page_shows_a_picture_that_dark_and_light_pages_can_show() -> None:
    front = (DOCS / "index.md").read_text(encoding="utf-8")
    picture = re.search(r"!\[[^\]]{20,}\]\((assets/[\w-]+\.svg)\)", front)
    assert picture is not None
    assert front.index("![") < front.index("What it promises")
    content = (DOCS / picture[1]).read_text(encoding="utf-8")
    assert ElementTree.fromstring(content).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in content
    assert len(content) < 8192


def test_promise_about_batch_jobs_says_its_bound() -> None:
    bound = f"{WorkerConfig.__dataclass_fields__['batch_slowdown'].default * 100:g} %"
    for file in (ROOT / "README.md", DOCS / "index.md"):
        promise = re.search(r"^3\. (.*\n   .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert promise is not None
        assert bound in promise[1]


def test_every_page_that_is_read_from_top_to_bottom_ends_with_where_to_go() -> None:
    made = {"api.md", "clients.md", "configuration.md", "metrics.md", "models.md", "parameters.md"}
    pages = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md") if page.name not in made}
    endings = {name: re.split(r"^## ", text, flags=re.MULTILINE)[-1] for name, text in pages.items()}
    assert [name for name, ending in endings.items() if not re.search(r"\]\([\w./-]+\.md\)", ending)] == []
