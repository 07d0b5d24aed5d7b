"""compose.yaml as a compose client reads it: variables filled in, services started in the order of their conditions."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.source import ROOT
from tests.ops.deploy.machine import Container, Machine

_DEFAULTED = re.compile(r"\$\{([A-Z0-9_]+):-([^${}]*)\}")
_REQUIRED = re.compile(r"\$\{([A-Z0-9_]+):\?([^${}]*)\}")
START_TIMEOUT_S = 120.0
# What the images of others define themselves.
_VOLUME_OPTIONS = {"ro"}


class UnsetVariableError(Exception):
    """compose.yaml asks for a variable that is not set; compose ends then, with these words."""


def made_passwords(directory: Path) -> dict[str, str]:
    """Return what `ops/deploy/passwords` writes into the .env of a checkout."""
    script = directory / "ops" / "deploy" / "passwords"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "ops/deploy/passwords", script)
    subprocess.run([script], check=True, capture_output=True)
    return dict(line.split("=", 1) for line in (directory / ".env").read_text().splitlines())


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Fill in `${NAME:-default}`, from the innermost, and `${NAME:?problem}`; no other form is used in the file.

    Raises:
        UnsetVariableError: A variable that is required is not set.
    """
    while match := _DEFAULTED.search(text):
        text = text[: match.start()] + (environ.get(match[1]) or match[2]) + text[match.end() :]
    while match := _REQUIRED.search(text):
        if not environ.get(match[1]):
            raise UnsetVariableError(f"{match[1]}: {match[2]}")
        text = text[: match.start()] + environ[match[1]] + text[match.end() :]
    assert "$" not in text, text
    return text


def read_compose(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return compose.yaml with these variables filled in."""

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
    """Return what `ENV` sets in all images of a Dockerfile."""
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
        self._services, self._configs = compose["services"], compose["configs"]
        self._directory = directory
        self.volumes = directory / "volumes"
        self.containers = {name: self._container(name, service) for name, service in self._services.items()}

    def config(self, name: str) -> str:
        """Return the text of a config."""
        return str(self._configs[name]["content"])

    def up(self, names: Sequence[str]) -> None:
        """Start services, each when what it depends on is there; those that end have ended well.

        Raises:
            AssertionError: One ended or did not become healthy; its output is told.
        """
        for name in names:
            for dependency, how in self._services[name].get("depends_on", {}).items():
                self._wait_for(dependency, how["condition"])
            self._machine.start(self.containers[name])

    def is_healthy(self, name: str) -> bool:
        """Run the service's own health check."""
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
        deadline = time.monotonic() + START_TIMEOUT_S
        while not conditions[condition]():
            is_waiting = process.poll() in (None, 0) and time.monotonic() < deadline
            assert is_waiting, f"{name}: {self.containers[name].output()[-2000:]}"
            time.sleep(0.05)

    def _container(self, name: str, service: dict[str, Any]) -> Container:
        mounts = {}
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            assert set(options) <= _VOLUME_OPTIONS
            mounts[target] = (ROOT / source).resolve() if source.startswith((".", "/")) else self.volumes / source
            if not source.startswith((".", "/")):
                mounts[target].mkdir(parents=True, exist_ok=True)
        for config in service.get("configs", []):
            mounts[config["target"]] = self._directory / f"config-{config['source']}"
            mounts[config["target"]].write_text(self._configs[config["source"]]["content"])
        image = image_environ(ROOT / service["build"]["dockerfile"]) if "build" in service else {}
        environ = image | {key: str(value) for key, value in service.get("environment", {}).items()}
        return Container(name, service.get("command", []), environ, mounts, self._directory / f"{name}.log")
