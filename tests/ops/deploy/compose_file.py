"""compose.yaml as a compose client reads it: variables filled in, services started in the order of their conditions."""

from __future__ import annotations

import graphlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.source import ROOT
from tests.ops.deploy.machine import Container, Machine
from tests.waiting import wait_for

_DEFAULTED = re.compile(r"\$\{([A-Z0-9_]+):-([^${}]*)\}")
_DOLLAR = "$$"
START_TIMEOUT_S = 120.0
# What the images of others define themselves.
_VOLUME_OPTIONS = {"ro"}


def made_passwords(directory: Path, **variables: str) -> dict[str, str]:
    """Let `ops/deploy/passwords` make its files below a directory, and return them by their names within it.

    Raises:
        subprocess.CalledProcessError: It refuses a variable; what it says is its `stderr`.
    """
    for service in secret_volumes():
        (directory / service).mkdir(parents=True, exist_ok=True)
    environ = {"PATH": os.environ["PATH"], **variables}
    command = ["sh", ROOT / "ops/deploy/passwords", directory]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return {str(file.relative_to(directory)): file.read_text() for file in directory.glob("*/*")}


def secret_volumes() -> list[str]:
    """Return the names of the services that have a volume with secrets."""
    return [name.removeprefix("secrets-") for name in read_compose({})["volumes"] if name.startswith("secrets-")]


def start_order(services: Mapping[str, Any]) -> list[str]:
    """Return the services that `docker compose up` starts, each behind those that it waits for."""
    waits = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    order = graphlib.TopologicalSorter(waits).static_order()
    return [name for name in order if "profiles" not in services[name]]


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Fill in `${NAME:-default}`, from the innermost; no other form is used in the file but `$$`, which is `$`."""
    while match := _DEFAULTED.search(text):
        text = text[: match.start()] + (environ.get(match[1]) or match[2]) + text[match.end() :]
    assert "$" not in text.replace(_DOLLAR, ""), text
    return text.replace(_DOLLAR, "$")


def read_compose(environ: Mapping[str, str]) -> dict[str, Any]:
    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return interpolate(value, environ)
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return value

    return filled(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def image_environ(dockerfile: Path) -> dict[str, str]:
    text = dockerfile.read_text().replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


class ComposeRun:
    """The services of compose.yaml, run as containers on a machine.

    Attributes:
        volumes: Folder of the named volumes; one that is there already is used as it is.
    """

    def __init__(self, machine: Machine, compose: dict[str, Any], directory: Path) -> None:
        """Lay out the containers; nothing runs yet."""
        self._machine = machine
        self._services = compose["services"]
        self._directory = directory
        self.volumes = directory / "volumes"
        self.containers = {name: self._container(name, service) for name, service in self._services.items()}

    def up(self) -> None:
        """Start all services without a profile, each when what it depends on is there; those that end have ended well.

        Raises:
            AssertionError: One ended or did not become healthy; its output is told.
        """
        for name in start_order(self._services):
            for dependency, how in self._services[name].get("depends_on", {}).items():
                self._wait_for(dependency, how["condition"])
            self._machine.start(self.containers[name])

    def is_healthy(self, name: str) -> bool:
        kind, *command = self._services[name]["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        return self._machine.execute(self.containers[name], command).returncode == 0

    def _wait_for(self, name: str, condition: str) -> None:
        process = self.containers[name].process
        assert process is not None, f"{name} must be started before what depends on it"
        conditions: dict[str, Callable[[], bool]] = {
            "service_completed_successfully": lambda: process.poll() == 0,
            "service_healthy": lambda: self.is_healthy(name),
        }
        output = self.containers[name].output
        wait_for(lambda: conditions[condition]() or process.poll() not in (None, 0), START_TIMEOUT_S, output)
        assert process.poll() in (None, 0), f"{name}: {output()[-2000:]}"

    def _container(self, name: str, service: dict[str, Any]) -> Container:
        mounts = {}
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            assert set(options) <= _VOLUME_OPTIONS
            mounts[target] = (ROOT / source).resolve() if source.startswith((".", "/")) else self.volumes / source
            if not source.startswith((".", "/")):
                mounts[target].mkdir(parents=True, exist_ok=True)
        for target in service.get("tmpfs", []):
            mounts[target] = self._directory / f"tmpfs-{name}{target.replace('/', '-')}"
            mounts[target].mkdir()
        image = image_environ(ROOT / service["build"]["dockerfile"]) if "build" in service else {}
        environ = image | {key: str(value) for key, value in service.get("environment", {}).items()}
        command = [*service.get("entrypoint", []), *service.get("command", [])]
        is_read_only = service.get("read_only", False)
        return Container(name, command, environ, mounts, self._directory / f"{name}.log", is_read_only)
