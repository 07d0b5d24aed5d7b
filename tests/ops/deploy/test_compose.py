"""compose.yaml runs the very commands and configuration files that `headrace up` runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from gateway.config import GatewayConfig
from gpu_worker.start.config import WorkerConfig
from ops.cli.keys import KeysConfig
from ops.cli.setup import SetupConfig
from ops.stack import commands
from ops.stack.config import UpConfig
from ops.stack.plan import Plan, make_plan
from ops.stack.state import StateDirectory
from shared.config import resolve, variable_name
from tests.architecture.source import PACKAGES, ROOT
from tests.ops.deploy.compose_file import UnsetVariableError, made_passwords, read_compose

HEADRACE_SERVICES = {
    "gateway": GatewayConfig,
    "worker": WorkerConfig,
    "worker-gpu": WorkerConfig,
    "setup": SetupConfig,
    "first-key": KeysConfig,
}
DOCKERFILE = ROOT / "ops/deploy/Dockerfile"
# What the compose specification knows of a service, of it what we use; a misspelt name is refused by every client.
SERVICE_KEYS = {
    *("image", "build", "command", "environment", "volumes", "configs", "depends_on", "restart", "stop_grace_period"),
    *("healthcheck", "ports", "profiles", "deploy"),
}
HEALTHCHECK_KEYS = {"test", "interval", "timeout", "retries", "start_period"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    state = StateDirectory(tmp_path)
    made = make_plan(resolve(UpConfig, {"port": "0"}, {}), state, {})
    state.close()
    return made


def test_gateway_and_workers_run_the_commands_that_up_spawns(services: dict[str, Any], plan: Plan) -> None:
    for service, spec in (("gateway", plan.gateway), ("worker", plan.workers[0]), ("worker-gpu", plan.workers[0])):
        program, *arguments = services[service]["command"]
        assert program == "headrace"
        assert spec.command == (sys.executable, "-P", "-m", "ops.cli", *arguments)


def test_servers_run_the_commands_and_files_that_up_spawns(services: dict[str, Any], plan: Plan) -> None:
    assert plan.nats is not None
    nats = services["nats"]
    assert tuple(nats["command"][:2]) == commands.NATS == (Path(plan.nats.command[0]).name, plan.nats.command[1])
    assert [flag for flag in nats["command"] if flag in plan.nats.command] == ["-c", "-a", "-p", "-sd"]
    mounted = dict(volume.split(":")[:2] for volume in nats["volumes"])
    assert (ROOT / "ops/nats/headrace.conf").samefile(plan.nats.command[2])
    assert nats["command"][2] == f"{mounted['./ops/nats']}/headrace.conf"

    assert plan.redis is not None
    redis = services["redis"]
    assert (redis["command"][0],) == commands.REDIS == (Path(plan.redis.command[0]).name,)
    mounted = dict(volume.split(":")[:2] for volume in redis["volumes"])
    (config,) = redis["configs"]
    assert config["target"] == redis["command"][1]
    made = yaml.safe_load((ROOT / "compose.yaml").read_text())["configs"][config["source"]]["content"]
    assert f"include {mounted['./ops/redis/headrace.conf']}\n" in made
    assert f'include "{ROOT / "ops/redis/headrace.conf"}"' in Path(plan.redis.command[1]).read_text()


def test_every_variable_given_to_a_part_is_one_of_its_settings(services: dict[str, Any]) -> None:
    for service, config in HEADRACE_SERVICES.items():
        known = {variable_name(field) for field in config.__dataclass_fields__}
        assert set(services[service]["environment"]) - known == set()


def test_nats_gets_every_password_that_its_configuration_asks_for(services: dict[str, Any]) -> None:
    asked = {commands.nats_password_variable(role) for role in commands.NATS_ROLES}
    assert asked == set(services["nats"]["environment"])
    configuration = "".join(file.read_text() for file in commands.NATS_CONFIG.parent.glob("*.conf"))
    assert all(f"${name}" in configuration for name in asked)


def test_nothing_starts_without_passwords_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UnsetVariableError, match="_PASSWORD: run ops/deploy/passwords first"):
        read_compose({})
    passwords = made_passwords(tmp_path / "a")
    assert (tmp_path / "a" / ".env").stat().st_mode & 0o777 == 0o600
    assert all(re.fullmatch("p[0-9a-f]{32}", value) for value in passwords.values())
    others = made_passwords(tmp_path / "b")
    assert len({*passwords.values(), *others.values()}) == 2 * len(passwords)
    for left_out in passwords:
        with pytest.raises(UnsetVariableError, match=left_out):
            read_compose({name: value for name, value in passwords.items() if name != left_out})
    # A second run keeps what is there.
    subprocess.run([tmp_path / "a/ops/deploy/passwords"], check=True, capture_output=True)
    assert dict(line.split("=", 1) for line in (tmp_path / "a/.env").read_text().splitlines()) == passwords


def test_passwords_follow_an_unfinished_line_and_replace_empty_ones(tmp_path: Path) -> None:
    made_passwords(tmp_path)
    (tmp_path / ".env").write_text("HEADRACE_REDIS_PASSWORD=\nMINE=1")
    subprocess.run([tmp_path / "ops/deploy/passwords"], check=True, capture_output=True)
    kept = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert kept["MINE"] == "1"
    read_compose(kept)


def test_no_password_is_on_a_command_line(tmp_path: Path) -> None:
    passwords = made_passwords(tmp_path)
    lines = [str(service.get("command", "")) for service in read_compose(passwords)["services"].values()]
    assert not [line for line in lines for password in passwords.values() if password in line]


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_images_are_built_from_targets_that_exist(services: dict[str, Any]) -> None:
    builds = [service["build"] for service in services.values() if "build" in service]
    dockerfile = (ROOT / builds[0]["dockerfile"]).read_text()
    for build in builds:
        assert f" AS {build['target']}\n" in dockerfile


def test_file_keeps_to_the_compose_specification(services: dict[str, Any]) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert {name for name in compose if not name.startswith("x-")} == {"services", "volumes", "configs"}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("healthcheck", {})) <= HEALTHCHECK_KEYS
        dependencies = service.get("depends_on", {})
        assert set(dependencies) <= set(services)
        if isinstance(dependencies, dict):
            assert {how["condition"] for how in dependencies.values()} <= CONDITIONS
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if volume[0] not in "./$"}
        assert named <= set(compose["volumes"])
        assert {config["source"] for config in service.get("configs", [])} <= set(compose["configs"])


def test_files_that_are_mounted_exist(services: dict[str, Any]) -> None:
    sources = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert [source for source in sources if source.startswith(".") and not (ROOT / source).exists()] == []


def test_volumes_of_our_images_belong_to_their_user(services: dict[str, Any]) -> None:
    made = re.search(r"install -d -o headrace (.+)", DOCKERFILE.read_text())
    assert made is not None
    for name in HEADRACE_SERVICES:
        volumes = [volume.split(":") for volume in services[name].get("volumes", [])]
        writable = {target for source, target, *options in volumes if "ro" not in options and source.isidentifier()}
        assert writable <= set(made[1].split())


@pytest.mark.parametrize("stage", ["gateway", "worker", "worker-gpu"])
def test_dependencies_are_a_layer_before_our_code(stage: str, tmp_path: Path) -> None:
    text = DOCKERFILE.read_text()
    body = text.split(f"FROM base AS {stage}\n")[1].split("\nFROM ")[0]
    assert (
        body.index(f"/requirements/{stage}.txt")
        < body.index("--requirement")
        < body.index("pip install --no-deps /src")
    )
    # Only pyproject.toml and the script go into them, so that nothing else makes them anew.
    assert "COPY pyproject.toml ops/deploy/requirements.py ./" in text
    extras = re.search(rf"requirements.py (.+) > {stage}.txt", text)
    assert extras is not None
    script = ROOT / "ops/deploy/requirements.py"
    done = subprocess.run([sys.executable, script, *extras[1].split()], capture_output=True, text=True, cwd=ROOT)
    listed = {Requirement(line).name for line in done.stdout.splitlines()}
    assert {"msgspec", "nats-py", "nkeys"} <= listed
    assert ("torch" in listed, "triton" in listed, "starlette" in listed) == (
        stage != "gateway",
        stage == "worker-gpu",
        stage == "gateway",
    )


def test_images_leave_out_what_nothing_reads_at_run_time() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    for part in ("README.md", "pyproject.toml", "LICENSE", *PACKAGES):
        assert f"!{part}" in ignored
    assert "ops/bench/results" in ignored


def _has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="needs the docker compose client")
@pytest.mark.parametrize("profile", [(), ("--profile", "gpu"), ("--profile", "metrics")])
def test_compose_accepts_the_file(profile: tuple[str, ...], tmp_path: Path) -> None:
    made_passwords(tmp_path)
    command = ["docker", "compose", "--env-file", str(tmp_path / ".env"), *profile, "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
