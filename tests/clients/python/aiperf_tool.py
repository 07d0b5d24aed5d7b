"""AIPerf, which measures servers under load."""

from __future__ import annotations

import re

from cells import KEY, MODEL, URL, run
from tool import TOKENIZER, run_tool


def measure() -> None:
    printed = run_tool(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", URL, "--api-key", KEY, "--endpoint-type", "chat", "--streaming"),
        *("--request-count", "6", "--concurrency", "2", "--tokenizer", str(TOKENIZER)),
        *("--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "16", "--ui", "simple"),
    )
    assert re.search(r"Request Error Rate \(%\) │\s+0\.00", printed), printed[-3000:]


run({"runs unmodified": measure})
