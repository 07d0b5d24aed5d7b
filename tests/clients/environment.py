"""The environment of the client libraries: their newest releases, apart from the project's own packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALL_TIMEOUT_S = 3600


# Each library in an environment of its own, or the one that wants an older release of another would have its way.
PYTHON_PACKAGES = {
    "openai_client.py": "openai",
    "anthropic_client.py": "anthropic",
    "langchain_client.py": "langchain-openai",
    "litellm_client.py": "litellm mcp",
    "pydantic_ai_client.py": "pydantic-ai-slim[openai,anthropic]",
    "guidellm_tool.py": "guidellm",
    "agents_sdk_client.py": "openai-agents",
    "aiperf_tool.py": "aiperf",
    "lm_eval_tool.py": "lm_eval[api] transformers",
    "aider_tool.py": "aider-chat",
}
# Programs for the terminal, which come as packages of Node.
AGENTS = ("codex_agent.py", "claude_code_agent.py")
# Need nothing but the program.
PLAIN = ("curl_client.py", "bodies_of_tools.py")


@dataclass(frozen=True)
class Environment:
    """Where the libraries are installed. The directory is kept from run to run."""

    directory: Path

    def command(self, script: Path) -> list[str]:
        """Install what a script of one client needs, and return what runs it."""
        if script.name in PLAIN:
            return [sys.executable, str(script)]
        if script.name in AGENTS:
            _make_node("agents", self.directory)
            programs = self.directory / "agents/node_modules/.bin"
            return ["env", f"PATH={programs}:{os.environ['PATH']}", sys.executable, str(script)]
        if script.suffix == ".py":
            directory = self.directory / script.stem
            _make_python(directory, PYTHON_PACKAGES[script.name])
            return [str(directory / "bin/python"), str(script)]
        _make_node("node", self.directory)
        # Node looks for packages beside the script.
        return ["node", str(self.directory / "node" / script.name)]


def _make_python(directory: Path, package: str) -> None:
    done = directory / "installed"
    if done.exists():
        return
    _run([sys.executable, "-m", "venv", str(directory)])
    _run([str(directory / "bin/python"), "-m", "pip", "install", "--quiet", *package.split()])
    done.touch()


def _make_node(name: str, parent: Path) -> None:
    directory = parent / name
    shutil.copytree(HERE / name, directory, dirs_exist_ok=True)
    done = directory / "installed"
    if done.exists():
        return
    # What an installation left that was interrupted counts as installed for npm.
    shutil.rmtree(directory / "node_modules", ignore_errors=True)
    _run(["npm", "install", "--silent", "--no-fund", "--no-audit"], directory)
    done.touch()


def _run(command: list[str], directory: Path | None = None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=directory, env=environ, timeout=INSTALL_TIMEOUT_S)
