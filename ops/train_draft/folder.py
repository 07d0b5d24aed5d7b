"""The folder of a draft: its weights in sixteen bits, its configuration, and what it needs of the target's files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.models.shard_files import SINGLE_FILE
from ops.train_draft.student import Student
from shared.errors import ConfigError

_PARTIAL = "draft-12345678.part/draft"
_MAX_PATH = 4095
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_folder(path: Path) -> None:
    """Refuse a folder that has something in it or cannot be written.

    Raises:
        ConfigError: It is not empty, not a folder, or not ours to write.
    """
    try:
        _check_name(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError("HEADRACE_OUT", f"{path} exists and is not empty; name a new folder")
    except OSError as error:
        raise ConfigError("HEADRACE_OUT", f"{path} cannot be read: {error.strerror}; name another folder") from None
    parent = _nearest(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError("HEADRACE_OUT", f"{path} cannot be made, since {parent} cannot be written; name another one")


def _check_name(path: Path) -> None:
    """Refuse names that are too long for the disk, and links that lead nowhere."""
    longest = max((os.fsencode(part) for part in path.parts), key=len, default=b"")
    allowed = os.pathconf(_nearest(path), "PC_NAME_MAX")
    if len(longest) > allowed:
        problem = f"has a name of {len(longest)} bytes, {os.fsdecode(longest[:20])!r}...; this disk takes {allowed}"
        raise ConfigError("HEADRACE_OUT", f"{problem} at most")
    written = len(os.fsencode(path.absolute() / _PARTIAL / SINGLE_FILE))
    if written > _MAX_PATH:
        raise ConfigError("HEADRACE_OUT", f"needs paths of {written} bytes; the system takes {_MAX_PATH} at most")
    for place in (path, *path.absolute().parents):
        if place.is_symlink() and not place.exists():
            raise ConfigError("HEADRACE_OUT", f"{place} is a link that leads nowhere; name a new folder")


def check_room(num_weights: int, path: Path) -> None:
    """Refuse a folder whose disk is too full for this number of weights.

    Raises:
        ConfigError: Says how much is free and how much is needed.
    """
    needed = num_weights * torch.float16.itemsize
    free = shutil.disk_usage(_nearest(path)).free
    if needed > free:
        problem = f"{path} has {shown_bytes(free)} free; the draft needs {shown_bytes(needed)}"
        raise ConfigError("HEADRACE_OUT", f"{problem}: free some, or name a folder elsewhere")


def write_draft(student: Student, target: Path, folder: Path) -> None:
    """Write a draft: all of it, or nothing where writing fails or is interrupted.

    A draft that is a model of its own gets the target's tokenizer.

    Raises:
        ConfigError: The disk refuses, or somebody else has written into the folder.
    """
    check_folder(folder)
    try:
        _write_whole(student, target, folder.resolve())
    except (OSError, SafetensorError) as error:
        problem = f"the draft cannot be written to {folder}: {error}; free some space, or name a folder elsewhere"
        raise ConfigError("HEADRACE_OUT", problem) from error


def _write_whole(student: Student, target: Path, folder: Path) -> None:
    """Write beside the folder, or inside of one that is there: it may be a disk of its own."""
    is_there = folder.is_dir()
    place = folder if is_there else folder.parent
    place.mkdir(parents=True, exist_ok=True)
    # What was taken is removed whatever happens.
    with TemporaryDirectory(prefix="draft-", suffix=".part", dir=place) as taken:
        made = Path(taken) / "draft"
        # Unlike the one around it, a folder that others can read.
        made.mkdir()
        _write(student, target, made)
        if is_there:
            _move_files(made, folder)
        else:
            # Fails if somebody else has put something there meanwhile.
            made.rename(folder)


def _move_files(made: Path, folder: Path) -> None:
    """Move the files up into a folder that has nothing but them; `config.json` comes last."""
    if {file.name for file in folder.iterdir()} != {made.parent.name}:
        raise FileExistsError(f"{folder} is not empty any more")
    names = sorted((file.name for file in made.iterdir()), key="config.json".__eq__)
    try:
        for name in names:
            (made / name).rename(folder / name)
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        raise


def _write(student: Student, target: Path, folder: Path) -> None:
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in student.tensors().items()}
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
    # The library writes files that only their owner can read.
    (folder / SINGLE_FILE).chmod(0o644)
    if student.first_distance == 1:
        for name in _TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, folder / name)
    config = student.config() | {"torch_dtype": str(torch.float16).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that there is."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
