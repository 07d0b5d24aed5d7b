"""Runs a program that measures or examines servers, as its users would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import KEY

TOKENIZER = Path(__file__).resolve().parents[3] / "ops/demo_model/model"
TIMEOUT_S = 300


def run_tool(name: str, *arguments: str, files: dict[str, str] | None = None) -> str:
    with tempfile.TemporaryDirectory() as directory:
        for file, text in (files or {}).items():
            Path(directory, file).write_text(text)
        environ = os.environ | {"OPENAI_API_KEY": KEY, "HF_HOME": directory, "HF_DATASETS_CACHE": directory}
        environ["HOME"] = directory
        done = subprocess.run(
            [str(Path(sys.executable).parent / name), *arguments],
            env=environ,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr
