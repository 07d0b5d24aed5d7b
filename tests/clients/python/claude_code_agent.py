"""Claude Code, Anthropic's coding agent for the terminal, on the Messages API."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

from cells import KEY, MODEL, URL, run
from forcing_proxy import forcing_proxy

TIMEOUT_S = 240
TOOL = "TaskCreate"


def ask(tool: str | None) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Let the agent do one turn; return its result and the requests that it sent."""
    with forcing_proxy(URL, tool, {"type": "tool", "name": TOOL}) as proxy, tempfile.TemporaryDirectory() as home:
        environ = os.environ | {
            "HOME": home,
            "ANTHROPIC_BASE_URL": proxy.url,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = ["claude", "-p", "--output-format", "json", "Say hello."]
        done = subprocess.run(
            command, env=environ, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        assert set(proxy.statuses) == {200}, proxy.statuses
        return json.loads(done.stdout), proxy.bodies


def turn() -> None:
    result, _ = ask(None)
    assert not result["is_error"], result
    assert result["result"], result


def turn_with_tool() -> None:
    result, requests = ask(TOOL)
    assert not result["is_error"], result
    last = requests[-1]["messages"]
    kinds = [block["type"] for message in last if isinstance(message["content"], list) for block in message["content"]]
    assert "tool_use" in kinds, kinds
    assert "tool_result" in kinds, kinds


run({"turn of an agent": turn, "turn with a tool": turn_with_tool})
