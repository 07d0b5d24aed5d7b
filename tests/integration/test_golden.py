"""Answers that are not the model's, through the whole system: gateways compare what workers answer, workers probe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors import safe_open

from gpu_worker.models.revision import model_revision
from ops.stack.config import DEMO_MODEL
from ops.stack.ports import free_port
from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _told(system: System, command: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status of `headrace golden COMMAND`, and what it says of each worker."""
    done = headrace("golden", command, "--json", "--state-dir", str(system.ready_file.parent / "state"))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {row["worker"]: row for row in rows if row.get("compared_with") in (None, "fleet")}


def _quiet_copy(target: Path) -> Path:
    """Copy the demo model, less sure of itself: norms are smaller, where a revision's fingerprint does not look."""
    shutil.copytree(DEMO_MODEL, target)
    data = (target / "model.safetensors").read_bytes()
    with safe_open(target / "model.safetensors", "pt") as tensors:
        names = tensors.keys()
        norms = [tensors.get_tensor(name) for name in names if name.endswith("attention_layernorm.weight")]
    for norm in norms:
        before, after = (each.contiguous().view(torch.uint8).numpy().tobytes() for each in (norm, norm * 0.33))
        assert data.count(before) == 1
        data = data.replace(before, after)
    (target / "model.safetensors").write_bytes(data)
    assert model_revision(target) == model_revision(DEMO_MODEL)
    return target


@contextmanager
def _worker(system: System, model: Path, port: int, *arguments: str) -> Iterator[None]:
    """Let one more worker join a system, with its health port."""
    command = [sys.executable, "-m", "ops.cli", "worker", "--model", str(model), "--served-model-name", system.model]
    environ = {"HEADRACE_NATS_URL": system.info["worker_nats_url"], "HEADRACE_WORKER_ID": "quiet"}
    options = ["--health-port", str(port), "--num-threads", "1", *arguments]
    with subprocess.Popen([*command, *options], env=os.environ | environ) as process:
        try:
            yield
        finally:
            process.kill()


def _ask(system: System, number: int) -> None:
    """Ask for an answer with log probabilities, of no prefix that another has."""
    body = {"model": system.model, "prompt": f"{number}. def main", "max_tokens": 24, "logprobs": 1, "seed": number}
    answer = system.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text


def test_worker_that_serves_another_model_quietly_is_seen_by_its_answers_and_withdraws_by_its_probes(
    tmp_path: Path,
) -> None:
    files, port = ["--golden-key-file", str(tmp_path / "key")], free_port()
    baseline, quiet = tmp_path / "baseline", _quiet_copy(tmp_path / "quiet")
    (tmp_path / "first").mkdir()
    with running_system(tmp_path / "first") as system:
        state = ["--state-dir", str(tmp_path / "first" / "state")]
        done = headrace("golden", "record", "--output", str(baseline), *state, *files)
        assert done.returncode == 0, done.stderr
    probed = ["--golden", str(baseline), *files]
    with running_system(tmp_path, *probed) as system, ThreadPoolExecutor(8) as pool:
        with _worker(system, quiet, port):
            wait_for(lambda: len(_told(system, "check")[1]) == 2, 60)
            list(pool.map(lambda number: _ask(system, number), range(300)))
            # Of two workers both are shown.
            wait_for(lambda: system.gauge('headrace_worker_drift{compared_with="fleet",measure="logprob"') > 0.5, 60)
            status, drift = _told(system, "drift")
            assert (status, {row["verdict"] for row in drift.values()}) == (1, {"differs"})
        good = next(name for name in drift if name != "quiet")
        with _worker(system, quiet, port, *probed):
            wait_for(lambda: _told(system, "check")[1].get("quiet", {}).get("has_withdrawn", False), 60)
            status, found = _told(system, "check")
            assert (status, found["quiet"]["probes"], found["quiet"]["failed"]) == (1, 2, 2)
            assert (found[good]["failed"], found[good]["in_a_row"]) == (0, 0)
            health = httpx2.get(f"http://127.0.0.1:{port}/health/ready")
            assert (health.status_code, "2 golden probes in a row differ" in health.text) == (503, True)
            assert system.gauge('headrace_worker_golden_withdrawn{model="headrace-demo",worker="quiet"}') == 1
            for number in range(10):
                _ask(system, number)
