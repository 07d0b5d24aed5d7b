"""Sources and pages say things as an engineer says them: a noun where there is one, and who does what."""

from __future__ import annotations

import re

from tests.architecture.source import PACKAGES, ROOT

DIALECT = re.compile(r"\b(nobody|whoever|(is|are|was|were) told|so many|what (is|was|are|were))\b", re.IGNORECASE)
KEPT = (
    # Prompts to the model, which other words would change.
    "gateway/responses/conversation.py",
    # An answer of the demo model.
    "ops/demo_model/model/README.md",
)
HEADING = "## What is not protected"


def test_no_sentence_stands_for_a_noun() -> None:
    paths = [*ROOT.glob("*.md"), *(path for room in PACKAGES for path in (ROOT / room).rglob("*"))]
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if path.suffix not in {".py", ".md", ".cpp", ".h"} or name.startswith(("CHANGELOG", "ops/decisions", *KEPT)):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line != HEADING and DIALECT.search(line):
                found.append(f"{name}:{number} {line.strip()}")
    assert found == []
