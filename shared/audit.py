"""The audit log: one JSON line for each action of an operator, with who, what, when, and what came of it.

A line is `{"time", "action", "outcome", "who", "what", "error"}`, appended by a single write to a file that its owner
alone may read, or to standard error where the file is `-`. Values are JSON, so nothing that a client chose can forge a
line. A command whose log cannot be written does nothing. Secrets are never part of `what`.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.nats_files import NatsFiles

AUDIT_HELP = "File to which each action of an operator appends a JSON line; - is standard error."
"""Describes the setting `audit_file`, which all commands of operators have."""

_VARIABLE = "HEADRACE_AUDIT_FILE"
_STANDARD_ERROR = Path("-")

_log = logging.getLogger(__name__)


@contextmanager
def audited(file: Path, action: str, *, nats_user: str | None = None, **what: Any) -> Iterator[dict[str, Any]]:
    """Write a line for what happens within: an action such as `keys.revoke`, by a user in NATS if that is used.

    The dictionary that is yielded is `what`, and may be added to.

    Raises:
        ConfigError: The file cannot be written; nothing was done.
    """
    with ExitStack() as opened:
        descriptor = _open(file)
        opened.callback(os.close, descriptor)
        try:
            yield what
        except BaseException as error:
            _append(descriptor, action, "failed", nats_user, what, error=f"{type(error).__name__}: {error}")
            raise
        _append(descriptor, action, "done", nats_user, what)


@contextmanager
def audited_drain(file: Path | None, action: str, *, nats_user: str | None, timeout_s: float) -> Iterator[None]:
    """Write a line for a drain, unless `file` is None. A process drains even where its log cannot be written."""
    with ExitStack() as stack:
        try:
            if file is not None:
                stack.enter_context(audited(file, action, nats_user=nats_user, timeout_s=timeout_s))
        except ConfigError as error:
            _log.warning("drain is not in the audit log: %s", error)
        yield


def servers_in(nats_url: str) -> str:
    """Return the hosts and ports of NATS URLs, without the credentials that may be in them."""
    return ",".join(part.rpartition("@")[2].removeprefix("nats://") for part in nats_url.split(","))


def nats_login(user: str | None, nats_url: str | None, files: NatsFiles) -> str | None:
    """Return the login that NATS uses: the file with credentials or seed, which wins, else a user's name, else None."""
    file = files.nats_creds_file or files.nats_nkey_seed_file
    if file is not None:
        return f"file {file}"
    return user or (urlsplit(nats_url.split(",")[0]).username if nats_url else None)


def _open(file: Path) -> int:
    if file == _STANDARD_ERROR:
        return os.dup(sys.stderr.fileno())
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(_VARIABLE, f"{file} cannot be written: {error.strerror}") from None


def _append(
    descriptor: int, action: str, outcome: str, nats_user: str | None, what: dict[str, Any], **error: str
) -> None:
    now = time.time()
    moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
    who = {
        "user": _user_name(),
        "uid": os.getuid() if hasattr(os, "getuid") else None,
        # The user who called sudo; a hint, since the environment is the user's own.
        "sudo_user": os.environ.get("SUDO_USER"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nats_user": nats_user,
    }
    entry: dict[str, Any] = {"time": moment, "action": action, "outcome": outcome, "who": who, "what": what}
    # One write, so that the lines of several processes do not mix.
    os.write(descriptor, json.dumps(entry | error, ensure_ascii=True, default=str).encode() + b"\n")


def _user_name() -> str:
    """Return the name of the process's user by its number, not by the environment, which anybody may set."""
    try:
        import pwd
    except ImportError:  # Windows
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
