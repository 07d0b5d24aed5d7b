"""Patterns of layer names: those that real configurations have, and those that would take forever."""

from __future__ import annotations

import time

import pytest

from gpu_worker.quantization.config_fields import QuantizationError, compile_pattern

NAME = "model.layers.31.self_attn.q_proj"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (r".*self_attn.*", True),
        (r".*lm_head", False),
        (r".*\.(?:1[0-5]|20|31)\..*(?:gate|q)_proj", True),
        (r"model\.layers\.\d+\.self_attn\.[qkv]_proj$", True),
        (r"(?!model\.layers\.31\.).*", False),
        (r"self_attn", False),
        (r"[](|?*+]*model", True),
    ],
)
def test_patterns_match_from_the_beginning(text: str, matches: bool) -> None:
    assert bool(compile_pattern("ignore", text).match(NAME)) is matches


@pytest.mark.parametrize(
    "text",
    [
        "(.+)+x",
        "(a*){9}",
        ".*" * 9,
        ".{,40}" * 9,
        ".?" * 30 + "Z",
        ".??" * 30 + "Z",
        "(.|.)" * 30 + "Z",
        "(?:.|.|.)" * 20 + "[Z]",
        # A comment that hides the repeats behind what looks like a class of characters.
        "(?x)#[\n" + ".?" * 30 + "Z",
        "(?#[)" + ".?" * 30 + "Z",
        "x" * 1001,
    ],
)
def test_pattern_that_may_take_forever_is_refused(text: str) -> None:
    with pytest.raises(QuantizationError, match="no repeated group") as raised:
        compile_pattern("ignore", text)
    assert raised.value.field == "quantization_config.ignore"


@pytest.mark.parametrize("text", [".?" * 20 + "Z", "(.|.)" * 20 + "[Z]", ".*" * 5 + "[YZ]", ".*.*.*(.|.)(.|.)[YZ]"])
def test_the_slowest_patterns_that_are_let_through_end_soon(text: str) -> None:
    started = time.process_time()
    assert compile_pattern("ignore", text).match(NAME) is None
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["(", "[", "a{2,1}", "*"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(QuantizationError, match="is not a regular expression"):
        compile_pattern("ignore", text)
