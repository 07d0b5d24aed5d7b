"""The fenced blocks of a page of the documentation, with what the comment above each says about running it.

`<!-- run -->` runs the block in the page's one shell; `<!-- run on gpu-1 -->` in the shell of that machine;
`<!-- run in background until "ready in" -->` goes on as soon as the block has printed that; `<!-- not run: REASON -->`
says why it cannot be run by a test. `<!-- prints -->` above a block of text: the last command has printed each of its
lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "ops" / "docs").rglob("*.md")])
COMMAND_LANGUAGES = {"sh", "bash", "console", "python"}
REASONS = {
    "needs adapters of your own",
    "needs a GPU",
    "needs a Kubernetes cluster",
    "needs a Docker engine",
    "needs a network",
    "needs root and systemd",
    "takes long",
    "part of a program",
}
_FENCE = re.compile(r"^(?P<comment><!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_RUN = re.compile(r'run(?: on (?P<host>[a-z0-9-]+))?(?: in background until "(?P<until>[^"]+)")?')


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        line: Where it begins, from 1.
        mark: The comment above it; empty where there is none.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def is_command(self) -> bool:
        return self.language in COMMAND_LANGUAGES

    @property
    def is_run(self) -> bool:
        return _RUN.fullmatch(self.mark) is not None

    @property
    def host(self) -> str:
        found = _RUN.fullmatch(self.mark)
        return (found and found["host"]) or "laptop"

    @property
    def until(self) -> str | None:
        found = _RUN.fullmatch(self.mark)
        return found["until"] if found else None

    @property
    def reason(self) -> str | None:
        head, _, reason = self.mark.partition(": ")
        return reason if head == "not run" else None

    @property
    def script(self) -> str:
        """What a shell is given."""
        return f"python - <<'END_OF_BLOCK'\n{self.text}\nEND_OF_BLOCK" if self.language == "python" else self.text

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"], match["text"], match["mark"] or "")
