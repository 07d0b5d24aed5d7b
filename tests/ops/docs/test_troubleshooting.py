"""What the troubleshooting page says that one sees is what the code says: a reworded message would leave it behind."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source import ROOT

PAGE = ROOT / "ops" / "docs" / "troubleshooting.md"
RUNBOOKS = PAGE.parent / "runbooks"
# Parts of a line that are not fixed: what stands between them is looked for.
_OPEN = re.compile(r"…|--[a-z-]+:|port 8000|HEADRACE_\w+|[:;]|10 s")
_LEAST = 8
_OF_THE_SYSTEM = {"Permission denied"}
_OF_NATS = {"maximum connections", "Slow Consumer", "sync_interval"}
_TYPED = ("headrace ", "--", "DELETE ", "du ", "nvidia-smi", "py-spy", "python ", "redis-cli")


def _quoted() -> list[str]:
    """Return the fixed parts of the quotations in the first cells of the page's tables."""
    found: list[str] = []
    for cell in re.findall(r"^\| (.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for span in re.findall(r"`([^`]+)`", cell):
            found += [part.strip(" :;,.") for part in _OPEN.split(span)]
    return [part.strip("/ ") for part in found if len(part) >= _LEAST]


@pytest.fixture(scope="module")
def source() -> str:
    return _texts_of("gateway", "gpu_worker", "shared", "ops", "kernels")


def _texts_of(*rooms: str) -> str:
    texts = []
    for room in rooms:
        texts += [file.read_text(encoding="utf-8") for file in (ROOT / room).rglob("*.py")]
    # A text that is too long for one line goes on in the next one.
    text = re.sub(r'"\n\s*r?f?"', "", "\n".join(texts))
    return re.sub(r"\{[^{}\n]*\}", "…", text).replace("`", "")


def test_what_the_page_quotes_is_said_by_the_code(source: str) -> None:
    quoted = _quoted()
    assert len(quoted) > 25
    missing = [part for part in quoted if part not in source and part not in _OF_THE_SYSTEM]
    assert not missing, missing


def test_what_the_page_quotes_is_provoked_by_a_test() -> None:
    tests = _texts_of("tests", "ops/chaos")
    assert [part for part in _quoted() if part not in tests and part not in _OF_THE_SYSTEM] == []


def test_what_the_runbooks_quote_of_logs_is_said_by_the_code(source: str) -> None:
    quoted = []
    for page in RUNBOOKS.glob("*.md"):
        spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        # Commands, and names of metrics and files, are checked elsewhere; texts of several words are messages.
        spans = [span for span in spans if " " in span and not span.startswith(_TYPED)]
        quoted += [
            part.strip(" :;,.") for span in spans for part in re.split(r"\b(?:NAME|WORKER)\b|…|\.\.\.|[:;]", span)
        ]
    quoted = [part for part in quoted if len(part) >= _LEAST and part not in _OF_NATS]
    assert len(quoted) > 5
    assert [part for part in quoted if part not in source] == []
