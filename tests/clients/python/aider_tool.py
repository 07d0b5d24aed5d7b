"""aider, a coding assistant for the terminal, on chat completions."""

from __future__ import annotations

from cells import MODEL, URL, run
from tool import run_tool

# The demo model would write until its context is full.
SETTINGS = "- name: {model}\n  edit_format: whole\n  extra_params: {{max_tokens: 200, stop: ['(']}}\n"
QUIET = ("--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", "--no-pretty")
PRIVATE = ("--analytics-disable", "--no-suggest-shell-commands")


def turn(streaming: str) -> None:
    model = f"openai/{MODEL}"
    asked = ("--yes-always", streaming, "--message", "Add a docstring.", "a.py")
    files = {"a.py": "def f(): pass\n", "settings.yml": SETTINGS.format(model=model)}
    server = ("--model", model, "--openai-api-base", f"{URL}/v1", "--model-settings-file", "settings.yml")
    told = run_tool("aider", *server, *QUIET, *PRIVATE, *asked, files=files)
    assert "received" in told, told
    assert "litellm." not in told, told


run({"turn of an agent": lambda: turn("--no-stream"), "stream": lambda: turn("--stream")})
