"""compose.yaml started from nothing: the very commands, files and variables of its services, as processes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kernels.build import cache_dir
from tests.ops.deploy.compose_file import ComposeRun, read_compose, start_order
from tests.ops.deploy.machine import Machine, can_make_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_machines(), reason="needs Linux namespaces with a network between them"),
]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, ComposeRun]]:
    directory = tmp_path_factory.mktemp("compose")
    # Kernels of this source that were compiled before spare the test their compilation.
    (directory / "volumes" / "cache").mkdir(parents=True)
    if (compiled := cache_dir(os.environ)).is_dir():
        (directory / "volumes" / "cache" / "kernels").symlink_to(compiled)
    # A clone in which nothing was done, and an environment in which nothing is set.
    compose = read_compose({})
    with Machine(directory / "machine", start_order(compose["services"])) as machine:
        run = ComposeRun(machine, compose, directory)
        run.up()
        yield machine, run


def first_key(run: ComposeRun) -> str:
    (key,) = re.findall(r"^hr-\S+$", run.containers["first-key"].output(), re.MULTILINE)
    return key


def ask(machine: Machine, run: ComposeRun, key: str, *, timeout_s: int = 60) -> dict[str, Any]:
    """Ask for a completion over the network, from another container."""
    body = json.dumps({"model": "headrace-demo", "prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0})
    command = ["curl", "-sS", "--retry", "60", "--retry-all-errors", "--retry-delay", "1", "-m", str(timeout_s)]
    headers = ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    url = "http://gateway:8000/v1/completions"
    done = machine.execute(run.containers["redis"], [*command, "-f", *headers, "-d", body, url], timeout_s=120)
    assert done.returncode == 0, done.stderr + run.containers["worker"].output()[-2000:]
    return json.loads(done.stdout)


def test_completion_is_answered_with_the_key_that_the_first_start_printed(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    answer = ask(machine, run, first_key(run))
    (choice,) = answer["choices"]
    assert "def add(a, b):" in choice["text"]
    assert run.is_healthy("gateway")
    assert run.is_healthy("worker")


def test_second_start_keeps_the_passwords(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose

    def secrets() -> dict[str, str]:
        return {str(file): file.read_text() for file in run.volumes.glob("secrets-*/*")}

    made = secrets()
    again = machine.execute(run.containers["passwords"], run.containers["passwords"].command)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert secrets() == made != {}


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_service_writes_nothing_outside_its_volumes(name: str, compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    for place in ("/usr/added", "/etc/added"):
        assert machine.execute(run.containers[name], ["sh", "-c", f"echo x > {place}"]).returncode != 0


def test_kernels_are_kept_in_the_volume(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    ask(machine, run, first_key(run))
    assert list((run.volumes / "cache" / "kernels").rglob("*.so"))


def test_second_start_makes_no_second_key(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    key = first_key(run)
    again = machine.execute(run.containers["first-key"], run.containers["first-key"].command)
    assert (again.returncode, again.stdout) == (0, "")
    assert key not in (run.volumes / "keys" / "keys.json").read_text()


def test_documented_command_makes_another_key_that_works(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    made = machine.execute(run.containers["gateway"], ["headrace", "keys", "create", "--tenant", "acme"])
    assert made.returncode == 0, made.stderr
    assert ask(machine, run, made.stdout.strip())["choices"]


def test_prometheus_can_scrape_the_operators_port_over_the_network(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    key = (run.volumes / "secrets-prometheus" / "operator-key").read_text().strip()
    command = ["curl", "-sS", "-f", "-m", "10", "-H", f"Authorization: Bearer {key}", "http://gateway:8001/metrics"]
    done = machine.execute(run.containers["redis"], command)
    assert done.returncode == 0, done.stderr
    assert "# TYPE" in done.stdout


def test_gateway_and_worker_end_well_when_they_are_asked_to(compose: tuple[Machine, ComposeRun]) -> None:
    machine, run = compose
    for name in ("worker", "gateway"):
        container = run.containers[name]
        assert container.process is not None
        machine.terminate(container)
        assert container.process.wait(35) == 0, container.output()[-2000:]
