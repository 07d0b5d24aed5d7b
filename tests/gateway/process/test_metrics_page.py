"""The reference of metrics is that of the code, and its names are such as Prometheus wants."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.process.metrics_page import EVERY_ROW, page

PAGE = Path(__file__).parents[3] / "ops" / "docs" / "metrics.md"


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m gateway.process.metrics_page > ops/docs/metrics.md"


def test_names_are_unique_and_follow_the_rules() -> None:
    names = [row.name for row in EVERY_ROW]
    assert len(set(names)) == len(names)
    for row in EVERY_ROW:
        assert re.fullmatch(r"(vllm:|headrace_)[a-z0-9_]+", row.name), row.name
        # vLLM's one exception is a histogram of tokens per iteration.
        assert row.name.endswith("_total") == (row.kind == "counter") or row.name == "vllm:iteration_tokens_total"
        assert row.text.endswith(".")
        assert not {"le", "instance", "job"} & set(row.labels)
