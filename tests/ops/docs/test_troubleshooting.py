"""What the troubleshooting page says that one sees is what the code says: a reworded message would leave it behind."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source import ROOT

PAGE = ROOT / "ops" / "docs" / "troubleshooting.md"
# Parts of a line that are not fixed: what stands between them is looked for.
_OPEN = re.compile(r"…|--[a-z-]+:|port 8000|HEADRACE_\w+|[:;]|10 s")
_LEAST = 8
_OF_THE_SYSTEM = {"Permission denied"}


def _quoted() -> list[str]:
    """Return the fixed parts of what is quoted in the first cells of the page's tables."""
    found: list[str] = []
    for cell in re.findall(r"^\| (.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for span in re.findall(r"`([^`]+)`", cell):
            found += [part.strip(" :;,.") for part in _OPEN.split(span)]
    return [part.strip("/ ") for part in found if len(part) >= _LEAST]


@pytest.fixture(scope="module")
def source() -> str:
    texts = []
    for room in ("gateway", "gpu_worker", "shared", "ops", "kernels"):
        texts += [file.read_text(encoding="utf-8") for file in (ROOT / room).rglob("*.py")]
    # A text that is too long for one line goes on in the next one.
    text = re.sub(r'"\n\s*f?"', "", "\n".join(texts))
    return re.sub(r"\{[^{}\n]*\}", "…", text).replace("`", "")


def test_what_the_page_quotes_is_said_by_the_code(source: str) -> None:
    quoted = _quoted()
    assert len(quoted) > 25
    missing = [part for part in quoted if part not in source and part not in _OF_THE_SYSTEM]
    assert not missing, missing
