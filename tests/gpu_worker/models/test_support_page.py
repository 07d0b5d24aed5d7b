from __future__ import annotations

from pathlib import Path

from tests.gpu_worker.models.support_page import support_page

PAGE = Path(__file__).parents[3] / "ops/docs/models.md"


def test_the_page_is_what_the_families_say() -> None:
    page = PAGE.read_text()
    assert support_page(page) == page, "run: python -m tests.gpu_worker.models.support_page ops/docs/models.md"
