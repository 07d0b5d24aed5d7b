"""Incident class: denial of service by regular expressions. No pattern of ours takes long on any text of a megabyte."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpu_worker.quantization.config_fields import QuantizationError, compile_pattern
from tests.architecture.source import PACKAGES, dotted_name, parsed, place, python_files

# Where time grows with the square of the length, this takes longer than `MAX_S`.
SIZE = 20_000
MAX_S = 2.0
# Seeds of texts that make patterns try again from each place: runs, runs that end badly, and pieces of our own syntax.
SEEDS = [*"a0 \t_-.=|`\\{(<%:\n\0é", "aA0_-. ", "re:", " - at `$", "at `$.", "(byte 1", '"a": ', "a-", "hr.tok."]
SEEDS += ["blk.0.", "<0x", "_00", "{:", "%0", "v=1.", "Error: "]


@dataclass(frozen=True)
class Written:
    """A pattern in our code."""

    where: str
    pattern: str | bytes


def written() -> Iterator[Written]:
    # Parsing all files takes longer than all tests of them.
    files = (path for path in python_files(*PACKAGES) if re.search(r"\bre\.|\bpattern=", path.read_text()))
    for path in files:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and (dotted_name(node.func) or "").startswith("re.") and node.args:
                pattern = node.args[0]
                if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str | bytes):
                    yield Written(place(path, node), pattern.value)
            elif isinstance(node, ast.keyword) and node.arg == "pattern" and isinstance(node.value, ast.Constant):
                yield Written(place(path, node.value), node.value.value)


PATTERNS = list(written())


def test_patterns_are_found() -> None:
    files = {found.where.rsplit(":", 1)[0] for found in PATTERNS}
    assert {"shared/bounds.py", "gateway/api/schemas/decoding.py", "gpu_worker/consumer/queued_message.py"} <= files


@pytest.mark.parametrize("found", PATTERNS, ids=lambda found: found.where)
def test_our_pattern_is_fast_on_hostile_text(found: Written) -> None:
    compiled = re.compile(found.pattern, re.DOTALL)
    started = time.process_time()
    for seed in SEEDS:
        for text in (seed * (SIZE // len(seed)), seed * (SIZE // len(seed)) + "!", "x" + seed * 1000 + "\n" + seed):
            hostile = text.encode() if isinstance(found.pattern, bytes) else text
            compiled.fullmatch(hostile)
            compiled.match(hostile)
    assert time.process_time() - started < MAX_S


@pytest.mark.parametrize("seed", SEEDS)
def test_searching_in_hostile_text_is_fast(seed: str) -> None:
    """Patterns that are searched for are tried from every place of a text."""
    text = seed * (SIZE // len(seed))
    started = time.process_time()
    for found in PATTERNS:
        # A message of an error or a line of a log is not longer.
        hostile = text[:3000]
        re.search(found.pattern, hostile.encode() if isinstance(found.pattern, bytes) else hostile)
    assert time.process_time() - started < MAX_S


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(a*)*b", "(.*a){20}", "a*a*a*a*a*a*a*b", "(?P<x>a)(?P=x)*", "((a+)b?)+c", "x" * 2000],
)
def test_pattern_of_a_model_s_configuration_that_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(QuantizationError):
        compile_pattern("ignore", pattern)
