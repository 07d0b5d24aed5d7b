"""Models named by their id at Hugging Face's hub, such as `Qwen/Qwen3-0.6B`: downloaded once, then found on the disk.

`huggingface_hub` does the work: it shows bars, resumes, keeps everything below `HF_HOME`, and obeys `HF_HUB_OFFLINE`,
`HF_ENDPOINT` and `HF_TOKEN`. A commit or branch may follow the id: `Qwen/Qwen3-0.6B@main`.
"""

from __future__ import annotations

import importlib
import re
from itertools import islice
from pathlib import Path

from shared.errors import ConfigError

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Git's own rule for names of branches and tags, in short: no part is empty or begins with a dot, and none has two.
_REVISION = re.compile(r"\w[\w-]*(\.[\w-]+)*(/\w[\w-]*(\.[\w-]+)*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_CHARACTERS = 512
# An address as a path has it, whose slashes are single ones.
_PAGE = re.compile(r"(?:https?:/)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)(?:/.*)?")
FORMS = "a folder in Hugging Face's format, a .gguf file, or an id at the hub"
_DOWNLOADED = Path(".cache", "huggingface", "download", "config.json.metadata")
_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]


def hub_id(model: Path) -> str | None:
    """Return the id that `model` is, without a revision; None where it is a path: one that exists, a file or no id."""
    if model.suffix.lower() == ".gguf":
        return None
    # The length first: a name that is too long for the system is an error even to ask for.
    found = _ID.fullmatch(str(model)) if len(str(model)) <= _MAX_CHARACTERS and not model.exists() else None
    return None if found is None else found["id"]


def hub_commit(folder: Path) -> str | None:
    """Return the commit at the hub whose files a folder holds; None where that is not known.

    The hub's cache keeps each commit in a folder of its name, `.../snapshots/<commit>`. In another folder
    (`hf download --local-dir`), the first line of the metadata file beside the download names it.
    """
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return folder.name
    try:
        with (folder / _DOWNLOADED).open(encoding="ascii") as file:
            commit = file.readline(_MAX_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def local_model(model: Path, variable: str) -> Path:
    """Return the folder of a model, downloaded if it is named by an id; `ConfigError` about `variable` if not."""
    if hub_id(model) is None:
        return model
    found = _ID.fullmatch(str(model))
    assert found is not None
    if found["revision"] is not None and not _REVISION.fullmatch(found["revision"]):
        problem = f"{found['revision']!r} is not a revision: write a commit, a branch or a tag after the @"
        raise ConfigError(variable, problem)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        problem = f"{model} is not a folder here, and a model's id needs `pip install huggingface_hub`"
        raise ConfigError(variable, problem) from None
    try:
        return Path(hub.snapshot_download(found["id"], revision=found["revision"], allow_patterns=_PATTERNS))
    except Exception as error:
        # The library raises errors of its own, of its HTTP client and of the system, in many combinations.
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        problem = (
            f"{model} is not a folder here, and could not be downloaded from the hub ({type(error).__name__}: {reason})"
        )
        raise ConfigError(variable, f"{problem}; check the id and the network, or name a local folder") from None


def existing_model(model: Path, variable: str, forms: str = FORMS) -> Path:
    """Return the folder or file of a model as `local_model` does, if `check_is_model` finds nothing wrong with it."""
    path = local_model(model, variable)
    check_is_model(path, variable, forms)
    return path


def check_is_model(path: Path, variable: str, forms: str = FORMS) -> None:
    """Check that a folder or file is there and looks like a model.

    Raises:
        ConfigError: It does not; names `variable` and the `forms` in which a model can be named.
    """
    is_gguf = (path.is_file() and path.suffix == ".gguf") or any(path.glob("*.gguf"))
    if is_gguf or (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise ConfigError(variable, f"{path} holds an adapter alone; merge it into its model's weights first")
    problem = "has no config.json and is no .gguf file" if path.exists() else "does not exist"
    raise ConfigError(variable, f"{path} {problem}; name {forms}{model_meant(path)}")


def model_meant(path: Path) -> str:
    """Return the question whether another path or id is meant; empty where none is likely.

    That is the one folder with a model in this one, the folder that a file of a model lies in, the id in an address of
    the hub, or the path in the user's own folder that a shell did not fill in.
    """
    home = Path.home().joinpath(*path.parts[1:]) if path.parts[:1] == ("~",) else path
    if (page := _PAGE.fullmatch(str(path))) is not None:
        found = [Path(page["id"])]
    elif path.is_file():
        found = [path.parent] if (path.parent / "config.json").is_file() else []
    elif home != path and home.exists():
        found = [home]
    else:
        found = [file.parent for file in islice(path.glob("*/config.json"), 2)]
    return f"; did you mean {found[0]}?" if len(found) == 1 else ""
