"""The operator's port of a running system, as commands ask it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ops.cli.running_system import Endpoint
from ops.stack.config import DEFAULT_STATE_DIR
from ops.stack.state import ReadyFile, has_died, read_ready_file
from shared.config import setting
from shared.errors import ConfigError, DependencyError
from shared.http_url import is_http_url


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """How to reach the operator's port of a gateway."""

    operator_url: str | None = setting(
        None, "Operator's port of a gateway, as http://host:port; found through the state directory if not given."
    )
    operator_key: str | None = setting(None, "Key of the operator's port.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")


def find_operator(access: OperatorAccess) -> Endpoint:
    """Return the operator's port to talk to.

    Raises:
        ConfigError: No URL is given and nothing runs on the state directory, or the URL is the public port's.
        DependencyError: What ran there was killed.
    """
    running = read_ready_file(access.state_dir)
    if access.operator_url is not None:
        if not is_http_url(access.operator_url):
            problem = f"{access.operator_url!r} is no URL of a server; write http://host:port"
            raise ConfigError("HEADRACE_OPERATOR_URL", problem)
        if running is not None and _origin(access.operator_url) == _origin(running.url):
            problem = f"{access.operator_url} is the public port; the operator's is {_operator_url(running)}"
            raise ConfigError("HEADRACE_OPERATOR_URL", problem)
        return Endpoint(access.operator_url, access.operator_key)
    if running is None:
        problem = f"not set, and no `headrace up` runs on {access.state_dir}; give --operator-url and --operator-key"
        raise ConfigError("HEADRACE_OPERATOR_URL", problem)
    if has_died(access.state_dir, running):
        raise DependencyError(f"no `headrace up` runs on {access.state_dir}; start it")
    return Endpoint(_operator_url(running), access.operator_key or running.operator_key or None)


def _operator_url(running: ReadyFile) -> str:
    return running.metrics_url.removesuffix("/metrics")


def _origin(url: str) -> str:
    """Return a base URL without the endings that clients give it, and with one name for this machine."""
    return url.rstrip("/").removesuffix("/v1").replace("//localhost:", "//127.0.0.1:")
