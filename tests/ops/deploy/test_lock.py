"""What deployments install: every package with its version and its hashes, and each name from one index alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.deploy import lock
from ops.deploy.lock import EXTRAS, LOCKED, NATS_PACKAGE, entries, without_cuda
from tests.architecture.source import ROOT
from tests.architecture.test_dependencies import requirements, resolved_extras


def pinned(name: str) -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for entry in entries((LOCKED / f"{name}.txt").read_text()):
        requirement = Requirement(re.split(r" *\\\n", entry)[0].strip())
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def is_satisfied(wanted: Requirement, by: list[Requirement]) -> bool:
    """Whether a version is locked for every platform, and each is one that the project allows."""
    versions = [next(iter(each.specifier)) for each in by]
    return bool(by) and all(
        version.operator == "==" and wanted.specifier.contains(version.version.split("+")[0]) for version in versions
    )


@pytest.mark.parametrize("name", [*EXTRAS, "nats"])
def test_every_entry_has_a_version_and_hashes(name: str) -> None:
    text = (LOCKED / f"{name}.txt").read_text()
    found = list(entries(text))
    assert text == "# Written by `make lock`.\n" + "".join(found)
    for entry in found:
        assert re.match(r"[a-z0-9.-]+==[0-9][^ ]*( ; [^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n$", entry), entry


@pytest.mark.parametrize("name", EXTRAS)
def test_lock_has_what_the_project_asks_for_now(name: str) -> None:
    found = pinned(name) | (pinned("torch-cpu") if name == "worker" else {})
    wanted = [*requirements(*resolved_extras(EXTRAS[name])), Requirement("setuptools>=77")]
    unmet = [str(each) for each in wanted if not is_satisfied(each, found.get(canonicalize_name(each.name), []))]
    assert unmet == [], "run `make lock`"


def test_nats_server_is_the_one_that_the_project_asks_for() -> None:
    (wanted,) = [each for each in requirements("embedded") if each.name == NATS_PACKAGE]
    assert is_satisfied(wanted, pinned("nats")[NATS_PACKAGE])


def test_worker_on_the_cpu_has_the_torch_of_the_others_and_nothing_of_cuda() -> None:
    (cpu,) = pinned("torch-cpu")["torch"]
    (gpu,) = pinned("worker-gpu")["torch"]
    assert str(cpu) == f"{gpu}+cpu"
    worker = [name for name in pinned("worker") if name.startswith(("torch", "triton", "cuda", "nvidia-"))]
    assert worker == []
    kept = {
        Requirement(entry.split(" \\")[0]).name
        for entry in without_cuda(entries((LOCKED / "worker-gpu.txt").read_text()))
    }
    assert set(pinned("worker")) <= kept


def test_each_file_is_written_with_what_is_installed_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_cuda = ["cuda-bindings", "nvidia-cublas-cu12", "torch", "triton"]
    names = [*of_cuda, "msgspec", NATS_PACKAGE, "nvidia-ml-py"]
    found = [f"{name}==1.0 \\\n    --hash=sha256:{'0' * 64}\n" for name in names]
    # Only workers have torch.
    without = [*without_cuda(found)]
    monkeypatch.setattr(lock, "_resolve", lambda extras: found if {"worker", "gpu"} & {*extras} else without)
    monkeypatch.setattr(lock, "LOCKED", tmp_path)
    lock.main()
    written = {
        file.stem: [entry.partition("==")[0] for entry in entries(file.read_text())] for file in tmp_path.iterdir()
    }
    assert written == {
        "gateway": names[len(of_cuda) :],
        "worker": names[len(of_cuda) :],
        "worker-gpu": names,
        "torch-cpu": ["torch"],
        "nats": [NATS_PACKAGE],
    }
    assert (tmp_path / "torch-cpu.txt").read_text().endswith("\ntorch==1.0+cpu\n")


def test_no_name_is_looked_for_at_two_indexes() -> None:
    found = subprocess.run(["git", "grep", "-lI", "extra-index" + "-url"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ""


def test_resolver_reads_the_project_s_extras_and_gives_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], dict[str, object]]] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.append((command, options))
        return SimpleNamespace(stdout="a==1 \\\n    --hash=sha256:0\nb==2 \\\n    --hash=sha256:1\n")

    monkeypatch.setattr(lock.subprocess, "run", run)
    assert [entry[:4] for entry in lock._resolve(["nats", "worker"])] == ["a==1", "b==2"]
    ((command, options),) = asked
    assert command[:5] == [lock.sys.executable, "-m", "uv", "pip", "compile"]
    places = [place for place, part in enumerate(command) if part == "--extra"]
    assert [command[place + 1] for place in places] == ["nats", "worker"]
    assert {"-", "--generate-hashes", "--universal", "--no-annotate", "--no-header", "--no-config"} <= {*command}
    assert command[command.index("--python-version") + 1] == lock.OLDEST_PYTHON
    assert (options["cwd"], options["input"], options["check"]) == (ROOT, lock.BUILD, True)
