"""The real client libraries against `headrace up`. `make clients` runs this, and writes `ops/docs/clients.md`.

The demo model has learned nothing of tools. That it calls one all the same, with the right arguments, is the grammar's
doing; so these tests are about the wire and the libraries, not about a model's sense.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.clients.environment import AGENTS, HERE, ROOT, Environment
from tests.clients.models import save_calling_model, save_long_model, save_thinking_model
from tests.clients.table import Cells, write_table
from tests.integration.system import System, running_system

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1500)]

# Name in the table, and the script that tries its features.
CLIENTS = {
    "openai (Python)": "python/openai_client.py",
    "openai (Node)": "node/openai.mjs",
    "anthropic (Python)": "python/anthropic_client.py",
    "AI SDK": "node/ai_sdk.mjs",
    "LangChain": "python/langchain_client.py",
    "LiteLLM": "python/litellm_client.py",
    "instructor": "python/instructor_client.py",
    "pydantic-ai": "python/pydantic_ai_client.py",
    "OpenAI Agents": "python/agents_sdk_client.py",
    "llama-index": "python/llama_index_client.py",
    "DSPy": "python/dspy_client.py",
    "smolagents": "python/smolagents_client.py",
    "CrewAI": "python/crewai_client.py",
    "curl": "python/curl_client.py",
    "six tools' bodies": "python/bodies_of_tools.py",
    "Codex": "python/codex_agent.py",
    "Claude Code": "python/claude_code_agent.py",
    "aider": "python/aider_tool.py",
    "GuideLLM": "python/guidellm_tool.py",
    "AIPerf": "python/aiperf_tool.py",
    "lm-eval": "python/lm_eval_tool.py",
}
# By the name of a system, what makes its model (None: the demo model), and the chat format of its worker.
MODELS: dict[str, tuple[Callable[[Path], None] | None, str]] = {
    "demo": (None, "hermes"),
    # With room for the prompts of coding agents.
    "long": (save_long_model, "hermes"),
    "thinking": (save_thinking_model, "hermes-thinking"),
    # It calls a tool that it was not offered.
    "calling": (save_calling_model, "hermes"),
}
# Those that try what a model does that thinks.
THINKING = ("openai_client.py", "openai.mjs", "anthropic_client.py", "ai_sdk.mjs", "pydantic_ai_client.py")
# Those that try what becomes of a call of a tool that was not offered.
CALLING = (*THINKING, "langchain_client.py")
CLIENT_TIMEOUT_S = 600


@pytest.fixture(scope="module")
def environment() -> Environment:
    directory = os.environ.get("HEADRACE_CLIENTS_DIRECTORY")
    return Environment(Path(directory) if directory else ROOT / ".venv/clients")


@pytest.fixture(scope="module")
def system_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], System]]:
    """Starts the system of a model when it is first wanted. All run until the last client is done."""
    with ExitStack() as running:

        @cache
        def started(name: str) -> System:
            save, chat_format = MODELS[name]
            directory = tmp_path_factory.mktemp(name)
            options: tuple[str, ...] = ()
            if save is not None:
                save(directory / "model")
                options = ("--model", str(directory / "model"))
            environ = {"HEADRACE_CHAT_FORMAT": chat_format}
            return running.enter_context(running_system(directory, *options, environ=environ))

        yield started


@pytest.fixture(scope="module")
def table() -> Iterator[Cells]:
    """What works in which client; written down once all have run."""
    cells: Cells = {}
    yield cells
    if len(cells) == len(CLIENTS):
        write_table(cells)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_feature_of_the_client_works(
    client: str, environment: Environment, system_of: Callable[[str], System], table: Cells, tmp_path: Path
) -> None:
    script = HERE / CLIENTS[client]
    system = system_of("long" if script.name in AGENTS else "demo")
    info = system.info
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HEADRACE_URL": info["url"],
        "HEADRACE_KEY": info["api_key"],
        "HEADRACE_MODEL": system.model,
        # No client reports these runs.
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
    for kind, scripts in (("thinking", THINKING), ("calling", CALLING)):
        if script.name in scripts:
            other = system_of(kind)
            prefix = f"HEADRACE_{kind.upper()}"
            environ |= {f"{prefix}_URL": other.url, f"{prefix}_KEY": other.info["api_key"]}
            environ |= {f"{prefix}_MODEL": other.model}
    done = subprocess.run(
        environment.command(script),
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    table[client] = {line["feature"]: line["why"] for line in lines}
    assert lines, done.stderr[-4000:]
    failed = {line["feature"]: line["why"] for line in lines if line["why"]}
    assert not failed, json.dumps(failed, indent=1) + done.stderr[-4000:]
