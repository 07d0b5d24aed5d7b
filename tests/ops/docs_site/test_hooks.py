"""How pages of the repository become those of the site; mkdocs itself stands aside."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.architecture.source import ROOT


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hooks, with a class of files that keeps what it is given."""
    generated: Any = SimpleNamespace(generated=lambda config, uri, abs_src_path: (config, uri, abs_src_path))
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        module: Any = ModuleType(name)
        module.File = generated
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ops.docs_site.hooks", raising=False)
    return importlib.import_module("ops.docs_site.hooks")


def test_decision_records_are_pages_of_the_site(hooks: ModuleType) -> None:
    config = object()
    files = hooks.on_files([], config)
    records = sorted((ROOT / "ops" / "decisions").glob("*.md"))
    assert files == [(config, f"decisions/{record.name}", str(record)) for record in records]
    assert len(files) > 50


@pytest.mark.parametrize(
    ("page", "text", "told"),
    [
        ("install.md", "see [why](../decisions/0001-a.md)", "see [why](decisions/0001-a.md)"),
        ("install.md", "see [the file](../deploy/compose.yaml)", "see the file (`ops/deploy/compose.yaml`)"),
        ("install.md", "see [`ops/a.py`](../a.py)", "see `ops/a.py`"),
        ("install.md", "see [rules](../../CONTRIBUTING.md)", "see rules (`CONTRIBUTING.md`)"),
        ("install.md", "see [a page](client.md#top)", "see [a page](client.md#top)"),
        ("decisions/0001-a.md", "see [docs](../docs/client.md)", "see [docs](../client.md)"),
        ("decisions/0001-a.md", "see [code](../bench/run.py)", "see code (`ops/bench/run.py`)"),
        ("decisions/0001-a.md", "see [other](0002-b.md)", "see [other](0002-b.md)"),
    ],
)
def test_link_out_of_the_documentation_becomes_a_name(hooks: ModuleType, page: str, text: str, told: str) -> None:
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hooks.on_page_markdown(text, shown, None, None) == told
