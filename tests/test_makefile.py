"""What `make` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.architecture.source import ROOT


def test_first_installation_prints_a_line_and_keeps_the_rest_in_a_log(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text("")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    # Talks as much as pip does, unless it is told not to; with a log, `--quiet` alone leaves a bar for each download.
    quiet = "*--quiet*--progress-bar\\ off*"
    (binaries / "python").write_text(f'#!/bin/sh\necho "$*" > asked\ncase "$*" in {quiet}) ;; *) seq 56 ;; esac\n')
    (binaries / "python").chmod(0o755)
    command = ["make", "--no-print-directory", ".venv/.embedded"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= 5, done.stdout
    assert "log: .venv/pip.log" in done.stdout
    assert "--log .venv/pip.log" in (tmp_path / "asked").read_text()
