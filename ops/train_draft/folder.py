"""The folder of a draft: its weights in sixteen bits, its configuration, and what it needs of the target's files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_worker.models.checkpoint import SINGLE_FILE
from ops.train_draft.student import Student
from shared.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_new(path: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        ConfigError: It is not empty, or not a folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError("HEADRACE_OUT", f"{path} exists and is not empty; name a new folder")


def write_draft(student: Student, target: Path, folder: Path) -> None:
    """Write a draft; `config.json` comes last, so that nobody takes an unfinished folder for one.

    A draft that is a model of its own gets the target's tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in student.tensors().items()}
    written = folder / f"{SINGLE_FILE}.part"
    save_file(tensors, written, {"format": "pt"})
    # The library writes files that only their owner can read.
    written.chmod(0o644)
    os.replace(written, folder / SINGLE_FILE)
    if student.first_guess == 1:
        for name in _TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
    config = student.config() | {"torch_dtype": str(torch.float16).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
