"""The demo model with a chat template that opens the model's reasoning, as those of models do that always think."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.clients.environment import ROOT

_DEMO_MODEL = ROOT / "ops/demo_model/model"
_ANSWER, _THOUGHT = "{{ '<|assistant|>' }}", "{{ '<|assistant|><think>\n' }}"


def save_thinking_model(directory: Path) -> None:
    """Write the model. It has learned nothing of thoughts, so all that it writes is one."""
    shutil.copytree(_DEMO_MODEL, directory)
    template = _read(directory / "tokenizer_config.json")["chat_template"]
    assert _ANSWER in template
    _change(directory / "tokenizer_config.json", chat_template=template.replace(_ANSWER, _THOUGHT))
    # Drawn by chance, a thought may end before it begins.
    _change(directory / "generation_config.json", temperature=0.0)


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(_read(path) | fields))
