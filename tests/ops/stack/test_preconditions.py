from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.config import MIN_SECRET_CHARACTERS
from gpu_worker.start.config import WorkerConfig
from ops.stack import preconditions
from ops.stack.config import DEMO_MODEL, UpConfig
from ops.stack.console import Console
from ops.stack.plan import Plan, make_plan
from ops.stack.preconditions import ALWAYS_FIT, check_parts
from ops.stack.state import StateDirectory
from shared.config import resolve
from shared.errors import ConfigError
from shared.golden import make_key
from tests.architecture.source import ROOT

Make = Callable[[dict[str, str]], Plan]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    state = StateDirectory(tmp_path)
    yield lambda environ: make_plan(resolve(UpConfig, {"port": "0"}, {}), state, environ)
    state.close()


@pytest.fixture
def worker_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a line of the shell stand in for the process that checks a worker's settings."""

    def put(line: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return put


def test_settings_that_fit_every_model_are_settings_of_a_worker() -> None:
    assert {field.name for field in dataclasses.fields(WorkerConfig)} > ALWAYS_FIT


def test_secret_that_the_gateway_would_refuse_is_refused_before_anything_starts(make: Make) -> None:
    check_parts(make({}), Console(), is_demo=True)
    with pytest.raises(ConfigError, match=f"HEADRACE_RESPONSES_SECRET: .*fewer than {MIN_SECRET_CHARACTERS}"):
        check_parts(make({"HEADRACE_RESPONSES_SECRET": "short"}), Console(), is_demo=True)


def test_baseline_that_cannot_be_used_is_told_before_anything_starts(make: Make, tmp_path: Path) -> None:
    (tmp_path / "baseline").write_text("{}")
    make_key(tmp_path / "key")
    for name, environ in {
        "GOLDEN_KEY_FILE": {"HEADRACE_GOLDEN": "baseline"},
        "GOLDEN": {"HEADRACE_GOLDEN": "baseline", "HEADRACE_GOLDEN_KEY_FILE": "key"},
    }.items():
        files = {variable: str(tmp_path / file) for variable, file in environ.items()}
        with pytest.raises(ConfigError, match=f"^HEADRACE_{name}: "):
            check_parts(make(files), Console(), is_demo=True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("echo first >&2; echo 'ImportError: no torch' >&2; exit 1", "could not be checked: ImportError: no torch"),
        ("kill -KILL $$", "could not be checked: exit status -9"),
        ("exec sleep 60", "could not be checked within 0.1 s"),
        ("exit 0", None),
    ],
)
def test_check_that_fails_itself_is_told_and_stops_nothing(
    make: Make,
    worker_check: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    told: str | None,
) -> None:
    plan = make({})
    worker_check(line)
    if told is not None and "within" in told:
        monkeypatch.setattr(preconditions, "_CHECK_TIMEOUT_S", 0.1)
    check_parts(plan, Console(), is_demo=False)
    output = capsys.readouterr()
    assert output.out + output.err == "" if told is None else told in output.out + output.err


def test_demo_model_with_defaults_starts_no_check(
    make: Make, worker_check: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make({})
    worker_check("exit 7")
    check_parts(plan, Console(), is_demo=True)
    assert capsys.readouterr().err == ""


class _ReleasingConsole(Console):
    """Lets what waits for a line of a pipe go on when something is said for the first time."""

    def __init__(self, pipe: Path) -> None:
        super().__init__()
        self._pipe: Path | None = pipe

    def say(self, who: str, text: str) -> None:
        super().say(who, text)
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.write_text("go\n")


def test_check_that_takes_its_time_is_told_of(
    make: Make,
    worker_check: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    plan = make({})
    os.mkfifo(tmp_path / "pipe")
    worker_check(f"read word < {tmp_path / 'pipe'}")
    monkeypatch.setattr(preconditions, "EVERY_S", 0.01)
    check_parts(plan, _ReleasingConsole(tmp_path / "pipe"), is_demo=False)
    assert f"reading {DEMO_MODEL} and the settings (" in capsys.readouterr().err


def test_check_dies_with_the_process_that_runs_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = f"""
import os
from ops.stack.console import Console
from ops.stack.preconditions import _run_told
_run_told(["sh", "-c", "echo $$ > {told}; exec sleep 600"], os.environ | {{"HEADRACE_MODEL": "m"}}, Console())
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as process:
        try:
            while not (told.exists() and told.read_text().endswith("\n")):
                time.sleep(0.01)
        finally:
            process.kill()
    pid = int(told.read_text())
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():  # empty of a zombie
        assert time.monotonic() < until, "the check goes on"
        time.sleep(0.01)
