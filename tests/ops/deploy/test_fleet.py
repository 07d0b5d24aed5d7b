"""A fleet of machines as the guide sets it up: units of systemd, TLS everywhere, three NATS servers, spot notices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.stack.config import DEMO_MODEL
from tests.architecture.source import ROOT
from tests.certificates import OPENSSL, make_authority, make_named_certificate
from tests.ops.deploy.machine import Container, Machine, can_make_machines
from tests.ops.deploy.unit_file import UNITS, read_unit
from tests.waiting import wait_for

NATS = ["nats-0", "nats-1", "nats-2"]
WORKERS = ["worker-0", "worker-1"]
PASSWORDS = {role: f"password{role}" for role in ("gateway", "worker", "batch", "admin")}
KEY = "hr-a-key-of-this-test-alone"
NATS_URL = ",".join(f"tls://{name}:4222" for name in NATS)
CERTIFICATES = {
    "HEADRACE_NATS_CA_FILE": "/etc/headrace/tls/ca.pem",
    "HEADRACE_NATS_CERT_FILE": "/etc/headrace/tls/client.pem",
    "HEADRACE_NATS_KEY_FILE": "/etc/headrace/tls/client.key",
    "HEADRACE_NATS_URL": NATS_URL,
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not can_make_machines() or OPENSSL is None, reason="needs Linux namespaces with a network between them, openssl"
    ),
]


class Fleet:
    """Machines that run units; each has its own /etc/headrace."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine = machine
        self._directory = directory
        self._authority = make_authority(directory)
        self.containers: dict[str, Container] = {}

    def host(self, name: str, variables: dict[str, str]) -> Path:
        """Make /etc/headrace of a machine: certificates, NATS's files, and every file of variables."""
        etc = self._directory / f"etc-{name}"
        shutil.copytree(ROOT / "ops" / "nats", etc / "nats", ignore=shutil.ignore_patterns("__pycache__"))
        (etc / "tls").mkdir()
        made = make_named_certificate(self._directory, self._authority, name)
        shutil.copy(self._authority.certificate, etc / "tls" / "ca.pem")
        for kind in ("server", "client"):
            shutil.copy(made.certificate, etc / "tls" / f"{kind}.pem")
            shutil.copy(made.key, etc / "tls" / f"{kind}.key")
        text = "".join(f"{key}={value}\n" for key, value in variables.items())
        for file in ("nats.env", "gateway.env", "worker.env"):
            (etc / file).write_text(text)
        return etc

    def start(self, name: str, unit_name: str, variables: dict[str, str], instance: str = "") -> None:
        etc = self.host(name, variables)
        unit = read_unit(unit_name, instance)
        environ = unit.environ(etc)
        state, cache = self._directory / f"state-{name}", self._directory / f"cache-{name}"
        state.mkdir()
        cache.mkdir()
        mounts = {
            "/etc/headrace": etc,
            "/opt/headrace/bin": self.machine.programs,
            "/var/lib/headrace": state,
            "/var/cache/headrace": cache,
        }
        container = Container(
            name, unit.command("ExecStart", environ), environ, mounts, self._directory / f"{name}.log"
        )
        self.containers[name] = container
        for before in unit.all("ExecStartPre"):
            done = self.machine.execute(container, before.split(), timeout_s=60)
            assert done.returncode == 0, done.stdout + done.stderr
        self.machine.start(container)

    def wait_for(self, name: str, words: str, timeout_s: float = 60) -> None:
        output = self.containers[name].output
        wait_for(lambda: words in output(), timeout_s, lambda: output()[-3000:])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    with Machine(directory / "machine", [*NATS, "gateway", *WORKERS, "client"]) as machine:
        fleet = Fleet(machine, directory)
        routes = ",".join(f"nats-route://{name}:6222" for name in NATS)
        passwords = {f"HEADRACE_NATS_{role.upper()}_PASSWORD": password for role, password in PASSWORDS.items()}
        for name in NATS:
            server = {"HEADRACE_NATS_SERVER_NAME": name, "HEADRACE_NATS_ROUTES": routes}
            fleet.start(name, "headrace-nats.service", passwords | server)
        for name in NATS:
            fleet.wait_for(name, "Server is ready")
        _set_up(fleet)
        gateway = {
            "HEADRACE_HOST": "0.0.0.0",
            "HEADRACE_API_KEY": KEY,
            "HEADRACE_NATS_USER": "gateway",
            "HEADRACE_NATS_PASSWORD": PASSWORDS["gateway"],
            "HEADRACE_TLS_CERT_FILE": "/etc/headrace/tls/server.pem",
            "HEADRACE_TLS_KEY_FILE": "/etc/headrace/tls/server.key",
            "HEADRACE_TLS_CLIENT_CA_FILE": "/etc/headrace/tls/ca.pem",
        }
        fleet.start("gateway", "headrace-gateway.service", CERTIFICATES | gateway)
        worker = {
            "HEADRACE_MODEL": str(DEMO_MODEL),
            "HEADRACE_SERVED_MODEL_NAME": "m",
            "HEADRACE_SIMULATE": "20",
            "HEADRACE_NATS_USER": "worker",
            "HEADRACE_NATS_PASSWORD": PASSWORDS["worker"],
        }
        for index, name in enumerate(WORKERS):
            fleet.start(name, "headrace-worker@.service", CERTIFICATES | worker, str(index))
        for name in ("gateway", *WORKERS):
            fleet.wait_for(name, '"serving"' if '"serving"' in fleet.containers[name].output() else "serving")
        fleet.containers["client"] = Container(
            "client",
            [],
            {"HEADRACE_API_KEY": KEY},
            {"/etc/headrace": fleet.host("client", {})},
            directory / "client.log",
        )
        yield fleet


def _admin(fleet: Fleet) -> Container:
    """Return an administrator's place at the first NATS machine."""
    first = fleet.containers["nats-0"]
    login = {"HEADRACE_NATS_USER": "admin", "HEADRACE_NATS_PASSWORD": PASSWORDS["admin"], "HEADRACE_AUDIT_FILE": "-"}
    return Container("nats-0", [], CERTIFICATES | login, first.mounts, first.log)


def _set_up(fleet: Fleet) -> None:
    """Make the streams, from the first NATS machine, as soon as the cluster has a leader."""
    admin = _admin(fleet)
    done: list[subprocess.CompletedProcess[str]] = []

    def is_made() -> bool:
        command = ["headrace", "setup", "--replicas", "3"]
        done.append(fleet.machine.execute(admin, command, timeout_s=60))
        return done[-1].returncode == 0

    wait_for(is_made, 60, lambda: done[-1].stderr)


def _load(fleet: Fleet, seconds: float, disturb: Callable[[], None]) -> dict[str, int]:
    """Load the fleet for a while, disturb it in the middle, and return how requests ended."""
    program = str(Path(__file__).with_name("fleet_load.py"))
    command = [sys.executable, program, "https://gateway:8000", "m", "40", str(seconds)]
    timer = threading.Timer(seconds / 2, disturb)
    timer.start()
    done = fleet.machine.execute(fleet.containers["client"], command, timeout_s=120)
    timer.join()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_request_fails_when_the_machine_that_leads_the_queue_is_lost(fleet: Fleet) -> None:
    program = str(Path(__file__).with_name("stream_leader.py"))
    leader = fleet.machine.execute(_admin(fleet), [sys.executable, program], timeout_s=60)
    assert leader.stdout in NATS, leader.stderr
    # The others elect another leader for some seconds, and requests wait for it.
    counts = _load(fleet, 10.0, lambda: fleet.machine.kill(fleet.containers[leader.stdout]))
    assert set(counts) == {"whole"}, counts
    assert counts["whole"] > 50


def test_spot_notice_drains_the_worker_and_no_request_fails(fleet: Fleet) -> None:
    worker = fleet.containers["worker-1"]
    shim = fleet.machine.programs / "systemctl"
    shim.write_text(f'#!/bin/sh\n[ "$*" = "stop headrace-worker@*" ] && touch {worker.log}.stopped\n')
    shim.chmod(0o755)
    script = (
        "ip address add 169.254.169.254/32 dev lo\n"
        f"python {Path(__file__).with_name('metadata_service.py')} &\n"
        f"sh {UNITS / 'headrace-spot-notice'}\n"
    )
    watching = Container(
        "worker-1", ["sh", "-c", script], {"HEADRACE_SPOT_CLOUD": "aws"}, {}, worker.log.with_suffix(".spot")
    )

    def give_notice() -> None:
        fleet.machine.start(watching)
        wait_for(Path(f"{worker.log}.stopped").exists, 20, watching.output)
        fleet.machine.terminate(worker)

    counts = _load(fleet, 8.0, give_notice)
    assert set(counts) == {"whole"}, counts
    assert counts["whole"] > 50
    assert "notice: {" in watching.output()
    assert worker.process is not None
    assert worker.process.wait(45) == 0, worker.output()[-2000:]


def test_units_are_what_systemd_accepts(fleet: Fleet) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    programs = fleet.machine.programs
    shutil.copy(UNITS / "headrace-spot-notice", programs / "headrace-spot-notice")
    container = Container("client", [], {}, {"/opt/headrace/bin": programs}, fleet.containers["client"].log)
    for unit in sorted(UNITS.glob("*.service")):
        name = str(unit).replace("worker@", "worker@0")
        if name != str(unit):
            name = str(fleet.machine.programs.parent / "headrace-worker@0.service")
            shutil.copy(unit, name)
        done = fleet.machine.execute(
            container, ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", name]
        )
        assert (done.returncode, done.stderr) == (0, ""), unit.name


def test_check_before_a_worker_starts_has_the_time_that_a_download_takes() -> None:
    unit = read_unit("headrace-worker@.service")
    assert [command.split()[-1] for command in unit.all("ExecStartPre")] == ["--check"]
    # systemd would end it after 90 s.
    assert unit.all("TimeoutStartSec") == ["infinity"]


def test_log_of_nats_is_bounded() -> None:
    unit = read_unit("headrace-nats.service")
    # It prints a line for each call that a login may not make.
    assert (unit.all("LogRateLimitIntervalSec"), unit.all("LogRateLimitBurst")) == (["10s"], ["200"])
