"""The command says where another distribution owns one of its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT


def install(folder: Path, name: str, version: str = "0.5") -> None:
    """Install a distribution that has the package of its name."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text("")
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run(*path: Path) -> subprocess.CompletedProcess[str]:
    """Ask for the version, with folders in which Python looks first."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import sys, headrace; sys.argv[1:] = ['--version']; headrace.main()"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["kernels", "ops", "shared", "gateway"])
def test_package_of_another_distribution_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    install(tmp_path, name)
    done = run(tmp_path, ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    owner = f"the package `{name}` that Python finds belongs to the distribution {name} 0.5, and headrace has one"
    assert owner in done.stderr
    assert f"`pip uninstall {name}`" in done.stderr


def test_folder_that_both_distributions_wrote_into_is_told(tmp_path: Path) -> None:
    (tmp_path / "headrace.py").write_text((ROOT / "headrace.py").read_text())
    for package in ("gateway", "gpu_worker", "kernels", "ops", "shared"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    install(tmp_path, "kernels")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "the distribution kernels 0.5" in done.stderr


def test_own_packages_are_ours() -> None:
    done = run(ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")
