"""GuideLLM, which measures servers under load."""

from __future__ import annotations

from cells import KEY, URL, run
from tool import TOKENIZER, run_tool


def measure() -> None:
    printed = run_tool(
        "guidellm",
        "run",
        "--disable-progress",
        *("--backend", f"kind=openai_http,target={URL},api_key={KEY}"),
        *("--profile", "kind=synchronous"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
    )
    assert "Benchmarking complete" in printed, printed[-2000:]


run({"runs unmodified": measure})
