"""Baselines are of these prompts: one that changes makes every baseline useless."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ops.golden.prompts import default_prompts, read_prompts
from shared.errors import ConfigError
from shared.golden import MAX_PROMPTS


def test_prompts_are_the_same_everywhere_and_always() -> None:
    digest = hashlib.sha256(json.dumps(default_prompts()).encode()).hexdigest()
    assert digest == "7d5494ca14bb41c8309229d3c80555d0369a637e9aec4fee3a4a0a9e19ebace7"


@pytest.mark.parametrize("count", [0, 1, MAX_PROMPTS, MAX_PROMPTS + 1])
def test_file_has_one_prompt_at_least_and_not_too_many(tmp_path: Path, count: int) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a text"\n\n' * count)
    if 1 <= count <= MAX_PROMPTS:
        assert read_prompts(file) == ["a text"] * count
        return
    with pytest.raises(ConfigError, match=f"has {count} prompts; 1 to {MAX_PROMPTS} are allowed"):
        read_prompts(file)


@pytest.mark.parametrize("line", ["[1]", '"  "', "text"])
def test_line_that_is_no_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'"a text"\n{line}\n')
    with pytest.raises(ConfigError, match="line 2 of"):
        read_prompts(tmp_path / "prompts.jsonl")
