"""Codex, OpenAI's coding agent for the terminal, on the Responses API."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from cells import KEY, MODEL, URL, run
from forcing_proxy import forcing_proxy

TIMEOUT_S = 400
TOOL = "create_goal"
CONFIG = """
model = "{model}"
model_provider = "headrace"
web_search = "disabled"
{more}
[model_providers.headrace]
name = "{name}"
base_url = "{url}/v1"
env_key = "HEADRACE_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def ask(
    tool: str | None, name: str = "Headrace", more: str = ""
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Let the agent do one turn; return its events and the requests that it sent."""
    with (
        forcing_proxy(URL, tool, {"type": "function", "name": TOOL}) as proxy,
        tempfile.TemporaryDirectory() as home,
    ):
        Path(home, "config.toml").write_text(CONFIG.format(model=MODEL, url=proxy.url, name=name, more=more))
        command = ["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello."]
        environ = os.environ | {"CODEX_HOME": home, "HEADRACE_KEY": KEY}
        done = subprocess.run(
            command, env=environ, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        assert set(proxy.statuses) == {200}, proxy.statuses
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], proxy.bodies


def turn() -> None:
    events, _ = ask(None)
    assert any(event["type"] == "turn.completed" for event in events), events
    assert any(event.get("item", {}).get("type") == "agent_message" for event in events), events


def turn_with_tool() -> None:
    events, requests = ask(TOOL)
    assert any(event["type"] == "turn.completed" for event in events), events
    assert len(requests) >= 2, "the agent did not come back with the tool's output"
    kinds = [item.get("type") for item in requests[1]["input"]]
    assert "function_call" in kinds, kinds
    assert "function_call_output" in kinds, kinds


def compacted_turn() -> None:
    # Of a provider of this name it asks that the server compacts, here as soon as the tool has been called.
    events, requests = ask(TOOL, "OpenAI", "model_auto_compact_token_limit = 1000")
    assert any(event["type"] == "turn.completed" for event in events), events
    kinds = [[item.get("type") for item in request["input"]] for request in requests]
    assert any("compaction_trigger" in each for each in kinds), kinds
    assert "compaction" in kinds[-1], kinds


run({"turn of an agent": turn, "turn with a tool": turn_with_tool, "compaction": compacted_turn})
