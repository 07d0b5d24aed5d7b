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

from gateway.config import MIN_SECRET_CHARACTERS, GatewayConfig
from gpu_worker.start.config import WorkerConfig
from ops.cli.keys import KeysConfig
from ops.cli.setup import SetupConfig
from ops.stack import servers
from ops.stack.config import UpConfig
from ops.stack.plan import Plan, make_plan
from ops.stack.state import StateDirectory
from shared.config import file_variable, resolve, variable_name
from tests.architecture.source import PACKAGES, ROOT
from tests.ops.deploy.compose_file import interpolate, made_passwords, read_compose, secret_volumes

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
    *("image", "build", "pull_policy", "entrypoint", "command", "environment", "volumes", "tmpfs", "read_only"),
    *("depends_on", "restart", "stop_grace_period", "healthcheck", "ports", "profiles", "deploy", "user"),
    *("cap_drop", "security_opt", "logging"),
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


def test_servers_run_the_commands_and_files_that_up_spawns(
    services: dict[str, Any], plan: Plan, tmp_path: Path
) -> None:
    assert plan.nats is not None
    nats = services["nats"]
    assert tuple(nats["command"][:2]) == servers.NATS == (Path(plan.nats.command[0]).name, plan.nats.command[1])
    assert [flag for flag in nats["command"] if flag in plan.nats.command] == ["-c", "-a", "-p", "-sd"]
    mounted = dict(volume.split(":")[:2] for volume in nats["volumes"])
    # A copy, beside which the tenants of this system are.
    assert Path(plan.nats.command[2]).read_text() == (ROOT / "ops/nats/headrace.conf").read_text()
    assert nats["command"][2] == f"{mounted['./ops/nats']}/headrace.conf"

    assert plan.redis is not None
    redis = services["redis"]
    assert (redis["command"][0],) == servers.REDIS == (Path(plan.redis.command[0]).name,)
    mounted = dict(volume.split(":")[:2] for volume in redis["volumes"])
    assert redis["command"][1] == f"{mounted['secrets-redis']}/redis.conf"
    made = made_passwords(tmp_path / "made")["redis/redis.conf"]
    assert f"include {mounted['./ops/redis/headrace.conf']}\n" in made
    assert f'include "{ROOT / "ops/redis/headrace.conf"}"' in Path(plan.redis.command[1]).read_text()


def test_every_variable_given_to_a_part_is_one_of_its_settings(services: dict[str, Any]) -> None:
    for service, config in HEADRACE_SERVICES.items():
        fields = config.__dataclass_fields__.values()
        known = {variable_name(field.name) for field in fields}
        files = {file_variable(variable_name(field.name)) for field in fields if field.metadata["setting"].secret}
        assert set(services[service]["environment"]) - known - files == set()


def test_files_of_secrets_that_parts_read_are_those_that_are_made(services: dict[str, Any], tmp_path: Path) -> None:
    made = {f"/run/headrace/{name}" for name in made_passwords(tmp_path)}
    for service in services.values():
        assert set(re.findall(r"/run/headrace/[\w-]+/[\w.-]+", str(service))) <= made
    configuration = (ROOT / "ops/deploy/prometheus.yml").read_text()
    assert set(re.findall(r"/run/headrace/\S+", configuration)) <= made


def test_nats_gets_every_password_that_its_configuration_asks_for(tmp_path: Path) -> None:
    lines = made_passwords(tmp_path)["nats/passwords"].split()
    asked = {servers.nats_password_variable(role) for role in servers.NATS_ROLES}
    assert asked == {line.partition("=")[0] for line in lines}
    configuration = "".join(file.read_text() for file in servers.NATS_CONFIG.parent.glob("*.conf"))
    assert all(f"${name}" in configuration for name in asked)


def test_one_command_starts_everything_and_all_wait_for_the_passwords(services: dict[str, Any]) -> None:
    # Nothing has to be set: a variable without a default would stay in the text.
    assert "$" not in str(read_compose({})).replace('exec "$@"', "").replace("$(cat ", "")
    for name, service in services.items():
        reads = [volume for volume in service.get("volumes", []) if volume.startswith("secrets-")]
        if reads and name != "passwords":
            assert service["depends_on"]["passwords"] == {"condition": "service_completed_successfully"}


def test_nothing_starts_without_passwords_of_its_own(tmp_path: Path) -> None:
    made, others = made_passwords(tmp_path / "a"), made_passwords(tmp_path / "b")
    chosen = [re.findall(r"\bp[0-9a-f]{32}\b", " ".join(files.values())) for files in (made, others)]
    # Four of NATS, those of Redis and Grafana, the operator's key and the secret of responses.
    assert [len(set(each)) for each in chosen] == [8, 8]
    assert not set(chosen[0]) & set(chosen[1])
    # A second run keeps the files.
    assert made_passwords(tmp_path / "a") == made


def test_password_of_ones_own_is_used_and_one_that_cannot_work_is_refused(tmp_path: Path) -> None:
    made_passwords(tmp_path / "own")
    chosen = made_passwords(tmp_path / "own", HEADRACE_REDIS_PASSWORD="mine1", HEADRACE_NATS_WORKER_PASSWORD="w2")
    assert chosen["gateway/redis-url"] == "redis://:mine1@redis:6379/0\n"
    assert "\nrequirepass mine1\n" in chosen["redis/redis.conf"]
    assert chosen["worker/nats-password"] == "w2\n"
    assert "HEADRACE_NATS_WORKER_PASSWORD=w2\n" in chosen["nats/passwords"]
    secrets = f"n{'2' * (MIN_SECRET_CHARACTERS - 1)},o{'1' * MIN_SECRET_CHARACTERS}"
    rotated = made_passwords(tmp_path / "rotated", HEADRACE_RESPONSES_SECRET=secrets)
    assert rotated["gateway/responses-secret"] == f"{secrets}\n"
    for short in (secrets[:-2], f"{secrets},", "n" * (MIN_SECRET_CHARACTERS - 1)):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            made_passwords(tmp_path / "rotated", HEADRACE_RESPONSES_SECRET=short)
        assert refused.value.stderr.startswith(f"HEADRACE_RESPONSES_SECRET: use {MIN_SECRET_CHARACTERS} characters")
    # It stays when it is no longer said.
    assert made_passwords(tmp_path / "own") == chosen
    for bad in ("4digits", "p@ss", "a b", "é"):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            made_passwords(tmp_path / "own", HEADRACE_REDIS_PASSWORD=bad)
        assert refused.value.returncode == 2
        assert refused.value.stderr.startswith("HEADRACE_REDIS_PASSWORD: use letters and digits alone")
    assert made_passwords(tmp_path / "own") == chosen


def test_service_sees_the_secrets_of_its_own_alone(services: dict[str, Any]) -> None:
    for name, service in services.items():
        volumes = [volume.split(":") for volume in service.get("volumes", []) if volume.startswith("secrets-")]
        if name == "passwords":
            assert {source for source, *_ in volumes} == {f"secrets-{one}" for one in secret_volumes()}
        else:
            own = name.removesuffix("-gpu")
            assert [volume for volume in volumes if volume != [f"secrets-{own}", f"/run/headrace/{own}", "ro"]] == []


def test_no_password_is_on_a_command_line_or_in_an_environment(services: dict[str, Any]) -> None:
    for name, service in services.items():
        words = [str(service.get("command")), str(service.get("entrypoint"))]
        if name != "passwords":
            words += map(str, service.get("environment", {}).items())
        for word in words:
            # A password could only come out of a variable; the key of one's own choice is its owner's to give.
            assert not re.search(r"\$\{HEADRACE_\w*(PASSWORD|OPERATOR_KEY)", word), name


def test_dollar_signs_of_the_commands_are_written_twice() -> None:
    assert interpolate("${A:-${B:-c}} $$@", {"B": "d"}) == "d $@"


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
    assert {name for name in compose if not name.startswith("x-")} == {"services", "volumes"}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("healthcheck", {})) <= HEALTHCHECK_KEYS
        dependencies = service.get("depends_on", {})
        assert set(dependencies) <= set(services)
        if isinstance(dependencies, dict):
            assert {how["condition"] for how in dependencies.values()} <= CONDITIONS
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if volume[0] not in "./$"}
        assert named <= set(compose["volumes"])


def test_files_that_are_mounted_exist(services: dict[str, Any]) -> None:
    sources = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert [source for source in sources if source.startswith(".") and not (ROOT / source).exists()] == []


def test_volumes_of_our_images_belong_to_their_user(services: dict[str, Any]) -> None:
    made = re.search(r"install -d -o headrace (.+)", DOCKERFILE.read_text().replace("\\\n", " "))
    assert made is not None
    for name in ("passwords", *HEADRACE_SERVICES):
        volumes = [volume.split(":") for volume in services[name].get("volumes", []) if volume[0] not in "./$"]
        assert {target for _, target, *options in volumes if "ro" not in options} <= set(made[1].split())


def test_nothing_can_be_written_but_volumes_and_logs_are_bounded(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "cap_add" not in service
        assert service["logging"] == {"driver": "local", "options": {"max-size": "10m", "max-file": "5"}}
    # Its entrypoint, run as root, would change to that user, which takes a capability.
    assert services["redis"]["user"] == "redis"


def test_our_images_are_built_and_those_of_others_are_named_by_their_content(services: dict[str, Any]) -> None:
    for name in ("passwords", *HEADRACE_SERVICES):
        # Built here: a registry's image of the same name is another project's.
        assert services[name]["pull_policy"] == "build"
    named = {service["image"] for service in services.values() if "build" not in service}
    named |= {line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("FROM ")} - {"base"}
    by_tag = {image for image in named if not re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9.-]+@sha256:[0-9a-f]{64}", image)}
    assert by_tag == {"nats:2.15.1-alpine"}


@pytest.mark.parametrize("stage", ["gateway", "worker", "worker-gpu"])
def test_dependencies_are_a_layer_before_our_code(stage: str) -> None:
    body = DOCKERFILE.read_text().split(f"FROM base AS {stage}\n")[1].split("\nFROM ")[0]
    copied, installed, ours = (
        body.index(text)
        for text in (f"ops/deploy/locked/{stage}.txt", "--require-hashes", "--no-deps --no-build-isolation")
    )
    assert copied < installed < ours
    # They depend on the lock files alone, so that nothing else rebuilds them.
    assert set(re.findall(r"ops/deploy/locked/(\S+)", body)) <= {f"{stage}.txt", "torch-cpu.txt"}
    assert body.count("pip install") == 2 + (stage == "worker")


def test_images_leave_out_what_nothing_reads_at_run_time() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    for part in ("README.md", "pyproject.toml", "LICENSE", *PACKAGES):
        assert f"!{part}" in ignored
    assert "ops/bench/results" in ignored
    # Secrets that lie in a clone stay out of images: `headrace keys` writes where it is called.
    assert {"**/keys.json*", "**/.env"} <= set(ignored)


def _has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="needs the docker compose client")
@pytest.mark.parametrize("profile", [(), ("--profile", "gpu"), ("--profile", "metrics")])
def test_compose_accepts_the_file(profile: tuple[str, ...]) -> None:
    command = ["docker", "compose", *profile, "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
