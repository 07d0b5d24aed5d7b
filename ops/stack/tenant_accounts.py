"""NATS's configuration of one `headrace up`: a copy of ours in the state directory, with accounts of further tenants.

Tenants are added while the system runs, and stay when it is started anew. Nothing of the repository is changed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ops.stack import commands
from ops.stack.state import write_private
from shared.subjects import encode_name

_FOLDER = "nats-conf"
_MORE = "more-tenants.conf"
_TENANTS = "tenants.conf"


def prepare(state_dir: Path) -> Path:
    """Copy NATS's configuration into a state directory, keep its tenants, and return the file to start NATS with."""
    folder = state_dir / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(commands.NATS_CONFIG, folder)
    if not (folder / _MORE).exists():
        write_private(folder / _MORE, "# Tenants that `headrace setup --tenants` has added.\n")
    shipped = (commands.NATS_CONFIG.parent / _TENANTS).read_text()
    write_private(folder / _TENANTS, f'{shipped}include "./{_MORE}"\n')
    return folder / commands.NATS_CONFIG.name


def add_account(state_dir: Path, account: str) -> None:
    """Append an account, in NATS's configuration language; NATS reads it when it is reloaded."""
    file = state_dir / _FOLDER / _MORE
    write_private(file, file.read_text() + account)


def tenant_login(state_dir: Path, tenant: str) -> tuple[str, str] | None:
    """Return user and password of a tenant that was added; None for others."""
    try:
        added = (state_dir / _FOLDER / _MORE).read_text()
    except OSError:
        return None
    user = f"batch-{encode_name(tenant)}"
    found = re.search(rf'user: "{re.escape(user)}", password: "(\w+)"', added)
    return None if found is None else (user, found[1])
