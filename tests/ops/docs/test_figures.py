"""Figures that the pages show are recorded ones, of the day and the commit that the page names."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT

PAGE = ROOT / "ops/docs/comparison.md"
RESULTS = ROOT / "ops/bench/results"
ENGINES = {"Headrace": "headrace", "llama.cpp": "llama.cpp", "vLLM": "vLLM CPU", "transformers": "transformers"}
_TABLE = re.compile(r"Recorded on (?P<day>[\d-]+) at (?P<commit>\w+)\.\n\n(?P<rows>(?:\|.*\n)+)")


@cache
def _recorded(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _figure(rows: list[dict[str, Any]], engine: str, batch: int, name: str) -> str:
    (row,) = [row for row in rows if (row["engine"], row["batch"]) == (engine, batch)]
    return f"{row[name]:,.0f}"


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in line.strip("|\n ").split("|")]


def _engine(title: str) -> str:
    return next(engine for name, engine in ENGINES.items() if title.startswith(name))


@pytest.mark.parametrize(
    "table", list(_TABLE.finditer(PAGE.read_text(encoding="utf-8"))), ids=lambda one: one["commit"]
)
def test_table_has_the_figures_that_were_recorded_of_the_commit_it_names(table: re.Match[str]) -> None:
    rows = [
        row
        for file in (RESULTS / "served.jsonl", RESULTS / "engine.jsonl")
        for row in _recorded(file)
        if row.get("commit") == table["commit"] and row["time"].startswith(table["day"])
    ]
    titles, _, *lines = map(_cells, table["rows"].splitlines())
    for first, *cells in lines:
        name, batch = ("decode_tokens_per_s", int(first)) if first.isdigit() else ("prefill_tokens_per_s", 32)
        for title, cell in zip(titles[1:], cells, strict=True):
            if title.startswith("time to first token"):
                engines = map(_engine, title.partition(": ")[2].split(", "))
                expected = ", ".join(_figure(rows, engine, batch, "ttft_p50_ms") for engine in engines) + " ms"
            else:
                expected = _figure(rows, _engine(title), batch, name)
            assert cell == expected, (titles, first, title)


def test_every_table_of_figures_says_of_when_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(_TABLE.findall(text)) == len(re.findall(r"^\| (?:streams|batch) \|", text, re.MULTILINE)) == 3


def test_gateways_cost_is_a_recorded_one() -> None:
    costs = {
        (row["commit"], row["time"][:10], row["target"], f"{row['us_per_token']:.1f}")
        for row in _recorded(RESULTS / "gateway.jsonl")
        if row.get("concurrency") == 256 and "--isolated" in row["command"]
    }
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| cost of the HTTP")]
    told = re.findall(r"(\d+\.\d)[^()|]*? beside (?:a floor of )?(\d+\.\d) on (\S+) at (\w+)", line)
    assert len(told) == 2
    for ours, floor, day, commit in told:
        assert {(commit, day, "isolated", ours), (commit, day, "floor", floor)} <= costs
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [row for row in readme.splitlines() if row.startswith("| Gateway |")]
    assert set(re.findall(r"\d+\.\d\b", row)) == {figure for each in told for figure in each[:2]}


def test_pages_count_the_families_of_models_alike() -> None:
    # Models around a text part, in a table of their own, are no further families.
    families, _, _ = (ROOT / "ops/docs/models.md").read_text(encoding="utf-8").partition("\n## ")
    listed = families.count("\n| `")
    for page in ("comparison.md", "features.md"):
        (told,) = re.findall(r"\[some (\d+) families\]", (PAGE.parent / page).read_text(encoding="utf-8"))
        assert int(told) == listed // 10 * 10, page


def test_pages_count_the_requests_of_killed_workers_alike() -> None:
    semantics = (PAGE.parent / "failure-semantics.md").read_text(encoding="utf-8")
    counted = [
        int(re.findall(r"\| ([\d,]+) requests", line)[0].replace(",", ""))
        for line in semantics.splitlines()
        if re.search(r"`worker-(sigkill|sigstop|oom) --requests 10000`", line)
    ]
    assert len(counted) == 3
    total = f"{sum(counted):,} requests while"
    assert [page for page in (ROOT / "README.md", PAGE) if total not in page.read_text(encoding="utf-8")] == []
    assert total in semantics
