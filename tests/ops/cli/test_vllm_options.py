"""Options of `vllm serve` and of SGLang's server: advice is about none that we have, and the page names the same."""

from __future__ import annotations

import re
from pathlib import Path

import ops
from ops.cli.gateway import command as gateway
from ops.cli.sglang_options import SGLANG_OPTIONS
from ops.cli.up import command as up
from ops.cli.vllm_options import VLLM_OPTIONS, advice
from ops.cli.worker import command as worker

EVERY = VLLM_OPTIONS | SGLANG_OPTIONS
PAGE = Path(ops.__file__).parent / "docs" / "coming-from.md"


def _options(*commands: object) -> set[str]:
    return {
        name
        for command in commands
        for option in getattr(command, "params", ())
        for name in option.opts + option.secondary_opts
    }


def test_advice_is_for_options_that_up_and_worker_lack() -> None:
    assert _options(up, worker) & EVERY.keys() == set()
    assert VLLM_OPTIONS.keys() & SGLANG_OPTIONS.keys() == set()


def test_advice_names_options_that_there_are() -> None:
    named = {name for text in EVERY.values() for name in re.findall(r"--[a-z][a-z-]+", text)}
    assert named - _options(up, worker, gateway) == set()


def test_advice_reads_underscores_as_vllm_does() -> None:
    assert advice("--trust_remote_code") == f"Of vLLM's: {VLLM_OPTIONS['--trust-remote-code']}"
    assert advice("--model-path") == "Of SGLang's: --model"
    assert advice("--no-such-thing") is None


def test_page_for_people_from_elsewhere_names_the_same_options() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in EVERY if f"`{name}" not in text] == []
