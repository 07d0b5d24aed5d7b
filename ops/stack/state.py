"""The state directory: what `headrace up` keeps between runs, and what tells other commands where it runs."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pwd
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from ops.stack.config import AUDIT_FILE_NAME
from shared.errors import ConfigError

READY_FILE = "ready.json"
LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """The running system, as the ready file describes it to tests, benchmarks and other commands.

    Attributes:
        nats_url: With a batch publisher's credentials; the configured URL when NATS is not ours.
        admin_nats_url: With an administrator's credentials; `worker_nats_url` with a worker's.
        redis_url: None when there is no Redis.
        metrics_url: Prometheus metrics of all gateway processes, readable with `operator_key` as a bearer token.
        pids: Process ids by role: `gateway`, `worker`, `nats`, `redis`.
    """

    url: str
    api_key: str
    nats_url: str
    admin_nats_url: str
    redis_url: str | None
    metrics_url: str
    operator_key: str
    pids: dict[str, list[int]]
    worker_nats_url: str = ""


_KEY = re.compile(r"[ -~]{16,}")


class StateDirectory:
    """Owns a state directory for as long as one `headrace up` runs on it; `ConfigError` where it cannot be used.

    Attributes:
        logs: Directory of the children's logs.
        nats: Directory of the batch queue and its results.
        redis: Directory in which Redis runs.
        audit_file: What operators did.
        keys_file: Further API keys, for `headrace keys`.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory if need be, and lock it."""
        self.path = path.absolute()
        self.logs, self.nats, self.redis = (self.path / name for name in ("logs", "nats", "redis"))
        self.audit_file, self.keys_file = self.path / AUDIT_FILE_NAME, keys_file_of(self.path)
        try:
            for directory in (self.path, self.logs, self.nats, self.redis):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._acquire(self.path / LOCK_FILE)
        except OSError as error:
            raise ConfigError("HEADRACE_STATE_DIR", f"{self.path} cannot be used: {_reason(error)}") from error

    def key(self, name: str) -> str:
        """Return the key of this name, such as `api_key`, of this directory; make one the first time."""
        file = self.path / name
        try:
            if not file.exists() or not file.read_bytes().strip():
                write_private(file, f"hr-{secrets.token_urlsafe(24)}\n")
            key = file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise ConfigError("HEADRACE_STATE_DIR", f"{file} cannot be used: {_reason(error)}") from error
        if not _KEY.fullmatch(key):
            raise ConfigError(
                "HEADRACE_STATE_DIR",
                f"{file} has no whole key: 16 or more ASCII characters; delete it, and the next start "
                "makes another, or copy it from a backup",
            )
        return key

    def close(self) -> None:
        """Let another `headrace up` use the directory."""
        self._lock.close()

    def _acquire(self, path: Path) -> TextIO:
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                "HEADRACE_STATE_DIR",
                f"{self.path} is in use by another `headrace up` (pid {holder}); stop it or choose another --state-dir",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock


def keys_file_of(state_dir: Path) -> Path:
    """Return where the further API keys of a state directory are."""
    return state_dir / "keys.json"


def holder_of(state_dir: Path) -> int | None:
    """Return the process id of the `headrace up` that runs, or last ran, on a state directory."""
    try:
        return int((state_dir / LOCK_FILE).read_text())
    except (OSError, ValueError):
        return None


def has_died(state_dir: Path, ready: ReadyFile) -> bool:
    """Whether the `headrace up` that wrote a ready file was killed, with all its parts.

    A lock that is held says that it runs, in another container perhaps, where its process id means something else.
    """
    holder = holder_of(state_dir)
    if holder is None or any(map(_is_there, [holder, *itertools.chain.from_iterable(ready.pids.values())])):
        return False
    try:
        with (state_dir / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _reason(error: OSError) -> str:
    """Say why a file or folder cannot be used, and whose it is where that is why."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "it, or a folder above it, is a file; name a folder, which is made if need be"
    if isinstance(error, PermissionError) and error.filename is not None:
        place, owner = _nearest_owner(Path(error.filename))
        return f"{error.strerror}: {place} belongs to {_user(owner)}, and this is {_user(os.geteuid())}"
    return str(error.strerror)


def _nearest_owner(place: Path) -> tuple[Path, int]:
    """Return a file, or the nearest folder above it that can be looked at, and the number of whom it belongs to."""
    try:
        return place, place.stat().st_uid
    except OSError:
        return _nearest_owner(place.parent)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, at once or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def write_ready_file(path: Path, readiness: ReadyFile) -> None:
    """Write the description of the running system."""
    write_private(path, json.dumps(asdict(readiness), indent=2) + "\n")


def read_ready_file(state_dir: Path) -> ReadyFile | None:
    """Return the system that runs on a state directory, or None.

    Raises:
        ConfigError: The ready file cannot be read, is damaged, or is another version's.
    """
    try:
        return ReadyFile(**json.loads((state_dir / READY_FILE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        other = "it is not of this version" if isinstance(error, TypeError) else "it is not JSON"
        file, why = state_dir / READY_FILE, getattr(error, "strerror", None) or other
        raise ConfigError(
            "HEADRACE_STATE_DIR", f"{file} cannot be read: {why}; start `headrace up` anew, or give another --state-dir"
        ) from None
