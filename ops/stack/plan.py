"""Which processes `headrace up` runs, decided before the first one starts."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from gateway.config import GatewayConfig
from gpu_worker.quantization.gguf.model_file import SUFFIX
from gpu_worker.start.config import WorkerConfig
from ops.stack import servers
from ops.stack.child import NATS_QUESTION, REDIS_QUESTION, ChildSpec, HealthCheck, gateway_question
from ops.stack.config import DEMO_MODEL, UpConfig
from ops.stack.ports import claim_port, free_port
from ops.stack.servers import find_nats_server, find_redis_server, prepare
from ops.stack.state import StateDirectory, write_private
from shared.config import resolve, variable_name
from shared.disaggregation import ROLES
from shared.errors import ConfigError
from shared.nats_files import NatsFiles
from shared.urls import check_url, with_login

# Time for running streams to finish at shutdown, and for a process to end after that.
DRAIN_S = 6.0
WORKER_DRAIN_S = 1.0
EXIT_S = 3.0
DEMO_MODEL_NAME = "headrace-demo"

# Settings of ours that mean something else, or nothing, to a gateway or a worker.
_OWN = "state_dir ready_file workers gateways hang_timeout_s host_name models_dir host_memory_bytes min_awake_s"
_OWN_VARIABLES = tuple(map(variable_name, _OWN.split()))


def files_of(config: NatsFiles) -> NatsFiles:
    """Return the files alone, of settings that name them among others."""
    return NatsFiles(**{item.name: getattr(config, item.name) for item in fields(NatsFiles)})


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """How to reach NATS in one role; `user` is None where the server asks for none or the URL names one."""

    url: str
    user: str | None
    password: str | None
    files: NatsFiles = field(default_factory=NatsFiles)

    @property
    def environ(self) -> dict[str, str]:
        """Variables that give a child this access."""
        found = {"HEADRACE_NATS_URL": self.url}
        # An empty one hides the variable of another NATS.
        for item in fields(NatsFiles):
            file = getattr(self.files, item.name)
            found[variable_name(item.name)] = "" if file is None else str(file.absolute())
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
        return with_login(self.url, self.user, self.password or "")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that workers serve; `name` is what clients ask for where it is not the folder's or file's name."""

    path: Path
    name: str | None = None

    @property
    def served_name(self) -> str:
        """What clients ask for."""
        return self.name or self.path.resolve().name.removesuffix(SUFFIX)


@dataclass(frozen=True, slots=True)
class Plan:
    """The children to run, and how everything is reached; `nats` and `redis` are None where they are not ours."""

    url: str
    operator_url: str
    operator_key: str
    api_key: str
    probe_key: str
    asks_for_key: bool
    admin: NatsAccess
    batch: NatsAccess
    worker: NatsAccess
    redis_url: str | None
    nats: ChildSpec | None
    redis: ChildSpec | None
    gateway: ChildSpec
    workers: tuple[ChildSpec, ...]


def make_plan(
    config: UpConfig, state: StateDirectory, environ: Mapping[str, str], models: Sequence[ModelChoice] = ()
) -> Plan:
    """Choose ports and passwords, find the servers, and lay out every child; without `models` those of `config`.

    Raises:
        ConfigError: A setting of a gateway or a worker cannot be used, or a port is taken.
        DependencyError: nats-server is needed and missing or too old.
    """
    base = {name: value for name, value in environ.items() if name not in _OWN_VARIABLES}
    # Refused here, a setting of a part is one line; a part that refuses it ends, and its log must be read.
    gateway_settings, worker_settings = resolve(GatewayConfig, {}, base), resolve(WorkerConfig, {}, base)
    port = claim_port(config.port)
    base["HEADRACE_AUDIT_FILE"] = base.get("HEADRACE_AUDIT_FILE") or str(state.audit_file)
    api_key = config.api_key or state.key("api_key")
    # Only this process asks with it, until the system is ready.
    probe_key = secrets.token_urlsafe(24)
    operator_port, operator_key = _operator_access(gateway_settings, state, port)
    health_check = HealthCheck(operator_port, gateway_question(operator_key))
    nats_port = free_port(taken=(port, operator_port))
    nats, access = _plan_nats(config, state, base, nats_port)
    redis, redis_url = _plan_redis(config, state, base, free_port(taken=(port, operator_port, nats_port)))
    gateway = _chosen_for_gateways(config, state, base, gateway_settings) | {
        "HEADRACE_PORT": str(port),
        "HEADRACE_OPERATOR_PORT": str(operator_port),
        "HEADRACE_OPERATOR_KEY": operator_key,
        "HEADRACE_API_KEY": api_key,
        "HEADRACE_PROBE_KEY": probe_key,
        "HEADRACE_REDIS_URL": redis_url or "",
    }
    models = models or [ModelChoice(config.model or DEMO_MODEL, None if config.model else DEMO_MODEL_NAME)]
    workers = _worker_environs(config, state, models, worker_settings, base | access["worker"].environ)
    drain_s = DRAIN_S if config.drain_timeout_s is None else config.drain_timeout_s
    return Plan(
        url=f"http://127.0.0.1:{port}",
        operator_url=f"http://127.0.0.1:{operator_port}",
        operator_key=operator_key,
        api_key=api_key,
        probe_key=probe_key,
        asks_for_key=gateway_settings.auth,
        admin=access["admin"],
        batch=access["batch"],
        worker=access["worker"],
        redis_url=redis_url,
        nats=nats,
        redis=redis,
        gateway=_part("gateway", "gateway", drain_s, base | access["gateway"].environ | gateway, health_check),
        workers=tuple(_part("worker", f"worker-{index}", drain_s, environ) for index, environ in enumerate(workers)),
    )


def _chosen_for_gateways(
    config: UpConfig, state: StateDirectory, base: Mapping[str, str], settings: GatewayConfig
) -> dict[str, str]:
    """Return the variables of gateways that do not depend on ports and keys of this start."""
    return {
        "HEADRACE_HOST": "127.0.0.1",
        "HEADRACE_OPERATOR_HOST": "127.0.0.1",
        "HEADRACE_PROCESSES": str(config.gateways),
        "HEADRACE_KEYS_FILE": base.get("HEADRACE_KEYS_FILE") or str(state.keys_file),
        "HEADRACE_ADAPTERS": settings.adapters or str(state.path.absolute() / "adapters"),
        "HEADRACE_FILES": settings.files or str(state.path.absolute() / "files"),
        "HEADRACE_RESPONSES_SECRET": settings.responses_secret or state.key("responses_secret"),
    }


def _plan_nats(
    config: UpConfig, state: StateDirectory, base: Mapping[str, str], port: int
) -> tuple[ChildSpec | None, dict[str, NatsAccess]]:
    if config.nats_url is not None:
        check_url(config.nats_url)
        given = NatsAccess(config.nats_url, config.nats_user, config.nats_password, files_of(config))
        return None, dict.fromkeys(servers.NATS_ROLES, given)
    # NATS reads a variable's value as configuration, hence a letter first and no signs.
    passwords = {role: f"p{secrets.token_hex(16)}" for role in servers.NATS_ROLES}
    arguments = (str(prepare(state.path)), "-a", "127.0.0.1", "-p", str(port), "-sd", str(state.nats))
    environ = {**base, **{servers.nats_password_variable(role): password for role, password in passwords.items()}}
    command = (find_nats_server(), *servers.NATS[1:], *arguments)
    spec = ChildSpec("nats", "nats", command, environ, EXIT_S, HealthCheck(port, NATS_QUESTION))
    return spec, {role: NatsAccess(f"nats://127.0.0.1:{port}", role, passwords[role]) for role in passwords}


def _plan_redis(
    config: UpConfig, state: StateDirectory, base: Mapping[str, str], port: int
) -> tuple[ChildSpec | None, str | None]:
    if config.redis_url is not None:
        return None, config.redis_url
    binary = find_redis_server()
    if binary is None:
        return None, None
    password = secrets.token_hex(16)
    # A private file, because everyone on the machine can read a command line.
    file = state.redis / "redis.conf"
    include, folder = _redis_text(servers.REDIS_CONFIG), _redis_text(state.redis)
    lines = [f"include {include}", f"port {port}", f"dir {folder}", f"requirepass {password}"]
    write_private(file, "\n".join(lines) + "\n")
    command = (binary, *servers.REDIS[1:], str(file))
    spec = ChildSpec("redis", "redis", command, dict(base), EXIT_S, HealthCheck(port, REDIS_QUESTION))
    return spec, f"redis://:{password}@127.0.0.1:{port}/0"


def _redis_text(path: Path) -> str:
    """Return a path quoted for Redis's configuration, whatever its characters."""
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'


def _operator_access(settings: GatewayConfig, state: StateDirectory, gateway_port: int) -> tuple[int, str]:
    port = claim_port(settings.operator_port or 0, "HEADRACE_OPERATOR_PORT", (gateway_port,))
    if settings.operator_without_key:
        return port, settings.operator_key or ""
    return port, settings.operator_key or state.key("operator_key")


def _worker_environs(
    config: UpConfig,
    state: StateDirectory,
    models: Sequence[ModelChoice],
    settings: WorkerConfig,
    base: Mapping[str, str],
) -> Iterator[dict[str, str]]:
    """Yield each worker's environment; a name that was chosen for them gets a number where there are several."""
    num_workers, roles = config.workers * len(models), _roles(config)
    own = {} if config.simulate is None else {"HEADRACE_SIMULATE": f"{config.simulate:g}"}
    if num_workers > 1 and "HEADRACE_NUM_THREADS" not in base:
        # Engines with more threads than cores between them make each other wait in every operation.
        own["HEADRACE_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_workers))
    for index in range(num_workers):
        model = models[index // config.workers]
        environ = {**base, **own, "HEADRACE_MODEL": str(model.path.absolute())}
        # Gateways and workers share it.
        environ.setdefault("HEADRACE_ADAPTERS", str(state.path.absolute() / "adapters"))
        if model.name is not None:
            environ.setdefault("HEADRACE_SERVED_MODEL_NAME", model.name)
        if settings.worker_id is not None and num_workers > 1:
            environ["HEADRACE_WORKER_ID"] = f"{settings.worker_id}-{index}"
        if roles:
            environ["HEADRACE_ROLE"] = roles[index % config.workers % len(roles)]
        yield environ


def missing_role(config: UpConfig) -> str | None:
    """Return a warning if no worker decodes, or none computes prompts; else None."""
    roles = set(_roles(config)[: config.workers])
    for lone, other in (("prefill", "decode"), ("decode", "prefill")):
        if roles == {lone}:
            return f"--roles: there is no {other} worker; name both {lone} and {other}, and set --workers to 2 or more"
    return None


def _roles(config: UpConfig) -> list[str]:
    names = [] if config.roles is None else [name.strip() for name in config.roles.split(",")]
    for name in names:
        if name not in ROLES:
            raise ConfigError("HEADRACE_ROLES", f"names {name[:40]!r}; a role is one of {', '.join(ROLES)}")
    if names and config.simulate is not None:
        raise ConfigError("HEADRACE_ROLES", "does not go with --simulate: a simulated engine keeps no keys and values")
    return names


def _part(
    role: Literal["gateway", "worker"],
    name: str,
    drain_s: float,
    environ: dict[str, str],
    health_check: HealthCheck | None = None,
) -> ChildSpec:
    if role == "worker":
        # By then the gateways have ended, and no client waits for what still runs.
        drain_s = min(drain_s, WORKER_DRAIN_S)
    environ["HEADRACE_DRAIN_TIMEOUT_S"] = f"{drain_s:g}"
    # The command of the very environment that we run in, whatever the PATH and the working directory hold.
    arguments = (sys.executable, "-P", "-m", "ops.cli", role)
    return ChildSpec(role, name, arguments, environ, drain_s + EXIT_S, health_check)
