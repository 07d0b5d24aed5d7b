"""Models named by their id at Hugging Face's hub, such as `Qwen/Qwen3-0.6B`: downloaded once, then found on the disk.

`huggingface_hub` does the work: it shows bars, resumes, keeps everything below `HF_HOME`, and obeys `HF_HUB_OFFLINE`,
`HF_ENDPOINT` and `HF_TOKEN`. A commit or branch may follow the id: `Qwen/Qwen3-0.6B@main`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from shared.errors import ConfigError

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Git's own rule for names of branches and tags, in short: no part is empty or begins with a dot, and none has two.
_REVISION = re.compile(r"\w[\w-]*(\.[\w-]+)*(/\w[\w-]*(\.[\w-]+)*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_CHARACTERS = 512
_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]


def hub_id(model: Path) -> str | None:
    """Return the id that `model` is, without a revision; None where it is a path: one that exists, a file or no id."""
    if model.suffix.lower() == ".gguf":
        return None
    # The length first: a name that is too long for the system is an error even to ask for.
    found = _ID.fullmatch(str(model)) if len(str(model)) <= _MAX_CHARACTERS and not model.exists() else None
    return None if found is None else found["id"]


def hub_commit(folder: Path) -> str | None:
    """Return the commit at the hub whose files a folder holds; None for a folder that was not downloaded from it.

    The hub's cache keeps each commit in a folder of its name, `.../snapshots/<commit>`.
    """
    folder = folder.absolute()
    is_snapshot = folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) is not None
    return folder.name if is_snapshot else None


def local_model(model: Path, variable: str) -> Path:
    """Return the folder of a model, downloaded if it is named by an id; a path is returned as it is.

    Raises:
        ConfigError: It cannot be downloaded; names `variable`.
    """
    if hub_id(model) is None:
        return model
    found = _ID.fullmatch(str(model))
    assert found is not None
    if found["revision"] is not None and not _REVISION.fullmatch(found["revision"]):
        problem = f"{found['revision']!r} is no revision: write a commit, a branch or a tag after the @"
        raise ConfigError(variable, problem)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        problem = f"{model} is no folder here, and a model's id needs `pip install huggingface_hub`"
        raise ConfigError(variable, problem) from None
    try:
        return Path(hub.snapshot_download(found["id"], revision=found["revision"], allow_patterns=_PATTERNS))
    except Exception as error:
        # The library raises errors of its own, of its HTTP client and of the system, in many combinations.
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        problem = (
            f"{model} is no folder here, and could not be downloaded from the hub ({type(error).__name__}: {reason})"
        )
        raise ConfigError(variable, f"{problem}; check the id and the network, or name a local folder") from None
