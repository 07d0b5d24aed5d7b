"""Golden probes behind the whole system: recorded by its API, replayed by its worker, and int4 is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob
from ops.stack.config import DEMO_MODEL
from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def _worker(system: System) -> dict[str, Any]:
    state = str(system.ready_file.parent / "state")
    done = headrace("golden", "check", "--json", "--state-dir", state)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found | {"status": done.returncode}


def test_model_in_four_bits_under_the_models_name_is_found(tmp_path: Path) -> None:
    list(quantize(QuantizeJob(DEMO_MODEL, tmp_path / "int4", "rtn-int4", 64, None, 4, 64, "cpu")))
    files = ["--golden-key-file", str(tmp_path / "key")]
    with running_system(tmp_path) as system:
        output = ["--output", str(tmp_path / "baseline"), "--state-dir", str(tmp_path / "state")]
        done = headrace("golden", "record", *output, *files)
        assert done.returncode == 0, done.stderr
    given = ["--golden", str(tmp_path / "baseline"), *files, "--golden-withdraw", "always"]
    with running_system(tmp_path, *given) as system:
        wait_for(lambda: _worker(system).get("probes", 0) >= 1, 60)
        assert (_worker(system)["failed"], _worker(system)["status"]) == (0, 0)
    wrong = ["--model", str(tmp_path / "int4"), "--served-model-name", "headrace-demo"]
    with running_system(tmp_path, *wrong, *given) as system:
        wait_for(lambda: _worker(system).get("has_withdrawn", False), 60)
        assert (_worker(system)["probes"], _worker(system)["failed"], _worker(system)["status"]) == (2, 2, 1)
