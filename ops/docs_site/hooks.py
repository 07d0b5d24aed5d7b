"""Hooks of mkdocs: decision records join the site, and links to files of the repository become their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_OPS = Path(__file__).parents[1]
_DECISION_LINK = re.compile(r"\]\((?:\.\./)+decisions/")
# [text](../deploy/file) -> text (`ops/deploy/file`)
_FILE_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the decision records as pages."""
    for record in sorted((_OPS / "decisions").glob("*.md")):
        files.append(File.generated(config, f"decisions/{record.name}", abs_src_path=str(record)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that lead out of the folder of the documentation."""
    if page.file.src_uri.startswith("decisions/"):
        # ../docs/x.md is ../x.md of the site; files of the code are named.
        markdown = re.sub(r"\]\(\.\./docs/", "](../", markdown)
        return re.sub(r"\[([^\]]+)\]\(\.\./(?!\w[\w-]*\.(?:md|json))([^)#\s]+)\)", r"\1 (`ops/\2`)", markdown)
    markdown = _DECISION_LINK.sub("](decisions/", markdown)
    return _FILE_LINK.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, up, path = link.groups()
    name = f"ops/{path}" if up.count("..") == 1 else path
    return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"
