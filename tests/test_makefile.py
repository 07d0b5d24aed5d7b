"""What `make` prints and installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with our Makefile, and an environment whose Python says little only if it is told to."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text("")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    # Talks as much as pip does; with a log, `--quiet` alone leaves a bar for each download.
    quiet = "*--quiet*--progress-bar\\ off*"
    (binaries / "python").write_text(f'#!/bin/sh\necho "$*" >> asked\ncase "$*" in {quiet}) ;; *) seq 56 ;; esac\n')
    (binaries / "python").chmod(0o755)
    return tmp_path


def make(project: Path, *targets: str) -> str:
    command = ["make", "--no-print-directory", *targets]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout


def test_first_installation_prints_a_line_and_keeps_the_rest_in_a_log(project: Path) -> None:
    printed = make(project, ".venv/.embedded")
    assert len(printed.splitlines()) <= 5, printed
    assert "log: .venv/pip.log" in printed
    assert "--log .venv/pip.log" in (project / "asked").read_text()


def test_extras_that_others_contain_are_not_installed_again(project: Path) -> None:
    make(project, ".venv/.dev", ".venv/.test", ".venv/.embedded")
    assert len((project / "asked").read_text().splitlines()) == 1
