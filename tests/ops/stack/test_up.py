"""`headrace up` as a user runs it, with a simulated engine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import openai
import pytest
from safetensors.torch import load_file, save_file

from ops.stack.config import DEMO_MODEL
from ops.stack.ports import free_port
from ops.stack.run import first_request, snippet
from tests.integration.system import System, running_system
from tests.servers import NatsServer, RedisServer, is_alive
from tests.waiting import wait_for

MODEL = "headrace-demo"
ROLES = ("gateway", "worker", "nats", "redis")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("up"), "--simulate", "5") as running:
        yield running


def _all_pids(system: System) -> list[int]:
    return [pid for role in ROLES for pid in system.info["pids"][role]]


def _generate(system: System, prompt: str = "x") -> str:
    return system.client().completions.create(model=MODEL, prompt=prompt, max_tokens=4).choices[0].text


def _serves(system: System, prompt: str) -> bool:
    try:
        return bool(_generate(system, prompt))
    except openai.APIError:
        return False


def _run_up(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops.cli", "up", "--state-dir", str(directory / "state"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=90)


def test_ready_file_describes_the_running_system(system: System) -> None:
    urls = {"url", "nats_url", "admin_nats_url", "worker_nats_url", "redis_url", "metrics_url"}
    assert set(system.info) == urls | {"api_key", "operator_key", "pids"}
    assert {role: len(pids) for role, pids in system.info["pids"].items()} == dict.fromkeys(ROLES, 1)
    assert all(is_alive(pid) for pid in _all_pids(system))
    assert _generate(system)


def test_system_that_is_well_warns_of_nothing(system: System) -> None:
    # That a busy machine stopped a process for a moment is not a fault of the system.
    lines = [line for line in system.log.read_text().splitlines() if "this process was paused for" not in line]
    assert not [line for line in lines if re.search(r"WARNING|ERROR", line)]


def test_printed_lines_can_be_pasted(system: System) -> None:
    printed = system.log.read_text()
    assert "starting with a simulated engine, 5 ms a step; logs in " in printed
    snippet = re.search(r"^\S*python\S* - <<'END'\n(.*\n)+?END\n", printed, re.MULTILINE)
    curl = re.search(r"^curl .*$", printed, re.MULTILINE)
    assert snippet is not None
    assert curl is not None
    done = subprocess.run(["sh", "-c", snippet[0]], capture_output=True, text=True, timeout=90)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    done = subprocess.run(["sh", "-c", curl[0]], capture_output=True, text=True, timeout=90)
    assert done.stdout.startswith("data: ")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_snippet_without_the_sdk_needs_nothing_but_python(system: System) -> None:
    arguments = first_request(MODEL, is_demo=True)
    assert arguments["temperature"] == 0
    lines = snippet(system.url, system.info["api_key"], arguments, has_sdk=False)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", lines], capture_output=True, text=True, timeout=90)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_metrics_need_the_printed_operator_key(system: System) -> None:
    printed = system.log.read_text()
    console = system.info["metrics_url"].removesuffix("/metrics") + "/console"
    assert f"  Console       {console}\n" in printed
    assert httpx2.get(f"{console}/", follow_redirects=True).text.startswith("<!doctype html>")
    assert f"Operator      {system.info['metrics_url']}\n  Operator key  {system.info['operator_key']}\n" in printed
    assert "headrace_" in system.metrics()
    for headers in ({}, system.headers()):
        assert httpx2.get(system.info["metrics_url"], headers=headers).status_code == 401
    assert httpx2.get(f"{system.url}/metrics", headers=system.headers()).status_code == 404


@pytest.mark.chaos
@pytest.mark.parametrize("role", ROLES)
def test_killed_child_is_started_again_and_the_system_serves(system: System, role: str) -> None:
    victim = system.info["pids"][role][0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: system.info["pids"][role] not in ([], [victim]), 40)
    assert re.search(rf"{role}(-0)?  was killed by SIGKILL; starting it again in", system.log.read_text())
    wait_for(lambda: _serves(system, f"after {role}"), 40)


@pytest.mark.chaos
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signal_stops_everything_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running_system(tmp_path, "--simulate", "5", "--gateways", "2") as system:
        pids = _all_pids(system)
        assert len(pids) == 5
        system.process.send_signal(number)
        assert system.process.wait(40) == 0
        assert system.log.read_text().splitlines()[-1] == "  headrace  stopped"
    assert [pid for pid in pids if is_alive(pid)] == []
    assert not (tmp_path / "ready.json").exists()


@pytest.mark.chaos
def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    with running_system(tmp_path, "--simulate", "5", "--gateways", "2") as system:
        pids = _all_pids(system)
        system.process.kill()
        system.process.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in pids), 40)


@pytest.mark.chaos
def test_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    with running_system(tmp_path, "--simulate", "50", environ={"HEADRACE_DRAIN_TIMEOUT_S": "60"}) as system:
        pids = _all_pids(system)
        client = system.client()

        def read_for_long() -> None:
            with contextlib.suppress(openai.APIError, httpx2.HTTPError):
                for _ in client.completions.create(model=MODEL, prompt="x", max_tokens=2000, stream=True):
                    streaming.set()

        streaming = threading.Event()
        reader = threading.Thread(target=read_for_long)
        reader.start()
        assert streaming.wait(40)
        system.process.send_signal(signal.SIGINT)
        wait_for(lambda: "Ctrl-C again kills" in system.log.read_text(), 40)
        assert system.process.poll() is None
        system.process.send_signal(signal.SIGINT)
        system.process.wait(20)
        reader.join(40)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_second_up_on_a_state_directory_is_refused(system: System, tmp_path: Path) -> None:
    state = system.ready_file.parent / "state"
    done = _run_up(tmp_path, "--simulate", "5", "--port", "0", "--state-dir", str(state))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"(pid {system.process.pid})" in done.stderr


@pytest.mark.slow
def test_part_that_cannot_start_is_named_with_its_reason(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = load_file(model / "model.safetensors")
    del weights[min(weights)]
    # That a weight is missing is seen when it is needed.
    save_file(weights, model / "model.safetensors")
    done = _run_up(tmp_path, "--port", "0", "--model", str(model))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("headrace: worker-0 exited with code 2: ")
    assert min(load_file(DEMO_MODEL / "model.safetensors")) in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].count("headrace: ") == 1
    assert "starting it again" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_given_servers_port_and_key_are_used_and_servers_are_left_alone(
    tmp_path: Path, start_nats: Callable[..., NatsServer], start_redis: Callable[..., RedisServer]
) -> None:
    nats, redis = start_nats(), start_redis()
    urls = {"HEADRACE_NATS_URL": nats.url, "HEADRACE_REDIS_URL": redis.url}
    port, keys = free_port(), tmp_path / "none.json"
    own = ["--port", str(port), "--api-key", "hr-mine", "--keys-file", str(keys)]
    with running_system(tmp_path, "--simulate", "5", *own, environ=urls) as system:
        assert (system.info["nats_url"], system.info["redis_url"]) == (nats.url, redis.url)
        assert (system.info["pids"]["nats"], system.info["pids"]["redis"]) == ([], [])
        assert (system.url, system.info["api_key"]) == (f"http://127.0.0.1:{port}", "hr-mine")
        assert _generate(system)
        assert f"{keys} does not exist; until `headrace keys --keys-file {keys} create`" in system.log.read_text()
    assert is_alive(nats.pid)
    assert is_alive(redis.pid)


def test_two_models_are_served_and_a_worker_of_a_third_joins(tmp_path: Path) -> None:
    folders = [shutil.copytree(DEMO_MODEL, tmp_path / name) for name in ("first", "second", "third")]
    models = [argument for folder in folders[:2] for argument in ("--model", str(folder))]
    with running_system(tmp_path, "--simulate", "5", *models) as system, ExitStack() as stack:
        client = system.client()
        assert {model.id for model in client.models.list()} == {"first", "second"}
        assert len(system.info["pids"]["worker"]) == 2
        for name in ("first", "second"):
            assert client.completions.create(model=name, prompt="x", max_tokens=2).model == name
        command = [sys.executable, "-m", "ops.cli", "worker", "--simulate", "5", "--model", str(folders[2])]
        environ = os.environ | {"HEADRACE_NATS_URL": system.info["worker_nats_url"]}
        worker = stack.enter_context(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
        stack.callback(worker.terminate)
        wait_for(lambda: "third" in {model.id for model in client.models.list()}, 40)
        assert client.completions.create(model="third", prompt="x", max_tokens=2).model == "third"
