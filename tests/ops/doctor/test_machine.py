"""Findings about GPUs and memory of a scripted machine."""

from __future__ import annotations

import importlib.util
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import pytest

from ops.doctor import machine
from ops.doctor.finding import Level
from ops.doctor.machine import machine_findings

_TWO = "echo 'A, 1 MiB'; echo 'B, 2 MiB'"


@pytest.mark.parametrize(
    ("script", "has_triton", "expected"),
    [
        (_TWO, True, [("gpu 0", Level.FINE, "A, 1 MiB"), ("gpu 1", Level.FINE, "B, 2 MiB")]),
        (
            _TWO,
            False,
            [
                ("gpu 0", Level.FINE, "A, 1 MiB"),
                ("gpu 1", Level.FINE, "B, 2 MiB"),
                ("gpu", Level.PROBLEM, "there is a GPU, but Triton is not installed"),
            ],
        ),
        ("echo no driver; exit 9", True, [("gpu", Level.PROBLEM, "nvidia-smi fails: no driver")]),
    ],
)
def test_gpus_are_told(
    script: str,
    has_triton: bool,
    expected: list[tuple[str, Level, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found_in = {"triton": ModuleSpec("triton", None) if has_triton else None}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *at: found_in[name] if name in found_in else find(name)
    )
    found = [one for one in machine_findings(tmp_path, {}) if one.topic.startswith("gpu")]
    assert [(one.topic, one.level, one.text) for one in found] == expected


@pytest.mark.parametrize(("free", "level"), [(2 << 30, Level.FINE), (1 << 29, Level.WARNING)])
def test_little_memory_is_a_warning(free: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.layers.free_memory.free_host_bytes", lambda: free)
    assert machine._memory().level is level


@pytest.mark.parametrize("error", [OSError("no such program"), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_driver_that_does_not_answer_is_a_problem(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", Mock(side_effect=error))
    (found,) = machine._gpus()
    assert (found.topic, found.level) == ("gpu", Level.PROBLEM)
    assert found.text.startswith("nvidia-smi does not answer: ")
