"""The folder of a draft: its weights in sixteen bits, its configuration, and what it needs of the target's files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpu_worker.execution.memory_budget import shown_bytes
from gpu_worker.models.checkpoint import SINGLE_FILE
from ops.train_draft.student import Student
from shared.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_folder(path: Path) -> None:
    """Refuse a folder that has something in it or cannot be written.

    Raises:
        ConfigError: It is not empty, not a folder, or not ours to write.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError("HEADRACE_OUT", f"{path} exists and is not empty; name a new folder")
    parent = _nearest(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError("HEADRACE_OUT", f"{path} cannot be made, since {parent} cannot be written; name another one")


def check_room(student: Student, path: Path) -> None:
    """Refuse, before training, a folder whose disk is too full for the weights.

    Raises:
        ConfigError: Says how much is free and how much is needed.
    """
    needed = sum(tensor.numel() for tensor in student.tensors().values()) * torch.float16.itemsize
    free = shutil.disk_usage(_nearest(path)).free
    if needed > free:
        problem = f"{path} has {shown_bytes(free)} free; the draft needs {shown_bytes(needed)}"
        raise ConfigError("HEADRACE_OUT", f"{problem}: free some, or name a folder elsewhere")


def write_draft(student: Student, target: Path, folder: Path) -> None:
    """Write a draft; `config.json` comes last, so that nobody takes an unfinished folder for one.

    A draft that is a model of its own gets the target's tokenizer.

    Raises:
        ConfigError: The disk refuses.
    """
    try:
        _write(student, target, folder)
    except (OSError, SafetensorError) as error:
        problem = f"the draft cannot be written to {folder}: {error}; free some space, or name a folder elsewhere"
        raise ConfigError("HEADRACE_OUT", problem) from error


def _write(student: Student, target: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in student.tensors().items()}
    written = folder / f"{SINGLE_FILE}.part"
    try:
        save_file(tensors, written, {"format": "pt"})
        # The library writes files that only their owner can read.
        written.chmod(0o644)
        os.replace(written, folder / SINGLE_FILE)
    finally:
        written.unlink(missing_ok=True)
    if student.first_guess == 1:
        for name in _TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
    config = student.config() | {"torch_dtype": str(torch.float16).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that there is."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
