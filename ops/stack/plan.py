"""Which processes `headrace up` runs, decided before the first one starts."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from ops.stack import commands
from ops.stack.child import ChildSpec
from ops.stack.config import UpConfig
from ops.stack.ports import claim_port, free_port
from ops.stack.servers import find_nats_server, find_redis_server
from ops.stack.state import StateDirectory, write_private

# The order of stopping: gateways finish their streams while workers still compute, servers go last.
GATEWAY_STOP_S = 8.0
WORKER_STOP_S = 5.0
SERVER_STOP_S = 3.0

# Settings of ours that mean something else, or nothing, to a gateway or a worker.
_OWN_VARIABLES = ("HEADRACE_STATE_DIR", "HEADRACE_READY_FILE", "HEADRACE_WORKERS", "HEADRACE_GATEWAYS")


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """How to reach NATS in one role; `user` is None where the server asks for none or the URL names one."""

    url: str
    user: str | None
    password: str | None

    @property
    def environ(self) -> dict[str, str]:
        """Variables that give a child this access."""
        found = {"HEADRACE_NATS_URL": self.url}
        if self.user is not None:
            found["HEADRACE_NATS_USER"] = self.user
        if self.password is not None:
            found["HEADRACE_NATS_PASSWORD"] = self.password
        return found

    @property
    def full_url(self) -> str:
        """URL with the credentials in it, for a client that is given nothing else."""
        if self.user is None:
            return self.url
        scheme, _, place = self.url.partition("://")
        return f"{scheme}://{quote(self.user)}:{quote(self.password or '')}@{place}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The children to run, and how everything is reached; `nats` and `redis` are None where they are not ours."""

    url: str
    metrics_url: str
    api_key: str
    admin: NatsAccess
    batch: NatsAccess
    redis_url: str | None
    nats: ChildSpec | None
    redis: ChildSpec | None
    gateway: ChildSpec
    workers: tuple[ChildSpec, ...]


def make_plan(config: UpConfig, state: StateDirectory, environ: Mapping[str, str]) -> Plan:
    """Choose ports and passwords, find the servers, and lay out every child.

    Raises:
        ConfigError: The port is taken, or the model is missing.
        DependencyError: nats-server is needed and missing or too old.
    """
    port, metrics_port = claim_port(config.port), free_port()
    base = {name: value for name, value in environ.items() if name not in _OWN_VARIABLES}
    api_key = config.api_key or state.api_key()
    nats, access = _plan_nats(config, state, base)
    redis, redis_url = _plan_redis(config, state, base)
    gateway = base | access["gateway"].environ | {
        "HEADRACE_HOST": "127.0.0.1",
        "HEADRACE_PORT": str(port),
        "HEADRACE_PROCESSES": str(config.gateways),
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_KEYS_FILE": str(state.keys_file),
        "HEADRACE_API_KEY": api_key,
        "HEADRACE_REDIS_URL": redis_url or "",
        "HEADRACE_DRAIN_TIMEOUT_S": environ.get("HEADRACE_DRAIN_TIMEOUT_S", str(GATEWAY_STOP_S - 2)),
    }  # fmt: skip
    return Plan(
        url=f"http://127.0.0.1:{port}",
        metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
        api_key=api_key,
        admin=access["admin"],
        batch=access["batch"],
        redis_url=redis_url,
        nats=nats,
        redis=redis,
        gateway=ChildSpec("gateway", "gateway", _headrace(commands.GATEWAY), gateway, GATEWAY_STOP_S),
        workers=tuple(_plan_worker(config, index, base | access["worker"].environ) for index in range(config.workers)),
    )


def _plan_nats(
    config: UpConfig, state: StateDirectory, base: Mapping[str, str]
) -> tuple[ChildSpec | None, dict[str, NatsAccess]]:
    if config.nats_url is not None:
        given = NatsAccess(config.nats_url, config.nats_user, config.nats_password)
        return None, dict.fromkeys(commands.NATS_ROLES, given)
    port = free_port()
    # NATS reads a variable's value as configuration, hence a letter first and no signs.
    passwords = {role: f"p{secrets.token_hex(16)}" for role in commands.NATS_ROLES}
    arguments = (str(commands.NATS_CONFIG), "-a", "127.0.0.1", "-p", str(port), "-sd", str(state.nats))
    spec = ChildSpec(
        "nats",
        "nats",
        (find_nats_server(), *commands.NATS[1:], *arguments),
        {**base, **{commands.nats_password_variable(role): password for role, password in passwords.items()}},
        SERVER_STOP_S,
    )
    return spec, {role: NatsAccess(f"nats://127.0.0.1:{port}", role, passwords[role]) for role in passwords}


def _plan_redis(
    config: UpConfig, state: StateDirectory, base: Mapping[str, str]
) -> tuple[ChildSpec | None, str | None]:
    if config.redis_url is not None:
        return None, config.redis_url
    binary = find_redis_server()
    if binary is None:
        return None, None
    port, password = free_port(), secrets.token_hex(16)
    # A private file, because everyone on the machine can read a command line.
    file = state.redis / "redis.conf"
    lines = [f'include "{commands.REDIS_CONFIG}"', f"port {port}", f'dir "{state.redis}"', f"requirepass {password}"]
    write_private(file, "\n".join(lines) + "\n")
    spec = ChildSpec("redis", "redis", (binary, *commands.REDIS[1:], str(file)), dict(base), SERVER_STOP_S)
    return spec, f"redis://:{password}@127.0.0.1:{port}/0"


def _plan_worker(config: UpConfig, index: int, environ: Mapping[str, str]) -> ChildSpec:
    own = {"HEADRACE_MODEL": str(config.model)}
    if config.simulate is not None:
        own["HEADRACE_SIMULATE"] = f"{config.simulate:g}"
    return ChildSpec("worker", f"worker-{index}", _headrace(commands.WORKER), {**environ, **own}, WORKER_STOP_S)


def _headrace(command: tuple[str, ...]) -> tuple[str, ...]:
    """Run the command of the very environment that we run in, whatever the PATH and the working directory hold."""
    assert command[0] == "headrace"
    return (sys.executable, "-P", "-m", "ops.cli", *command[1:])
