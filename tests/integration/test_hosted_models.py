"""Models that are loaded, replaced, put to sleep and woken while the system runs: no request is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import nats
import pytest

from ops.stack.config import DEMO_MODEL
from tests.integration.hosted import load_on, operator, order, shown, wait_for_state
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 40
NEED = 600_000_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    shutil.copytree(DEMO_MODEL, directory / "good")
    shutil.copytree(DEMO_MODEL, directory / "other")
    shutil.copytree(DEMO_MODEL, directory / "broken")
    (directory / "broken" / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[System]:
    """Two models of 600 MB do not fit beside each other."""
    bounds = ("--host-memory-bytes", "1000000000", "--min-awake-s", "1")
    directory = tmp_path_factory.mktemp("hosted")
    with running_system(directory, "--simulate", "2", "--models-dir", str(models), *bounds) as running:
        yield running


def put_to_sleep(system: System, name: str) -> None:
    """Order it until it is taken: the last heartbeat may tell of a request that has just ended."""
    wait_for(lambda: operator(system, "/sleep", {"name": name}).status_code == 200)
    wait_for_state(system, name, "asleep")


def ask(system: System, name: str, prompt: str, **fields: Any) -> httpx2.Response:
    body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    headers = {**system.headers(), "Cache-Control": "no-cache"}
    return httpx2.post(f"{system.url}/v1/completions", headers=headers, json=body, timeout=120)


def check(answer: httpx2.Response) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == TOKENS


async def publish_job(system: System, subject: str, job: dict[str, Any]) -> None:
    """Publish a job as a client does that knows no gateway, and wait for its result."""
    client = await nats.connect(system.info["nats_url"])
    results = await client.subscribe(f"hr.result.default.{job['id']}")
    await client.jetstream().publish(subject, json.dumps(job).encode())
    await results.next_msg(timeout=60)
    await client.close()


def test_model_is_replaced_under_load_and_nothing_is_lost(system: System) -> None:
    order(system, "load", "live", path="good", memory_bytes=NEED // 2)
    wait_for_state(system, "live", "awake")
    with load_on(lambda number: check(ask(system, "live", f"live {number}"))) as answered:
        wait_for(lambda: len(answered) > 20)
        before = set(system.info["pids"]["worker"])
        order(system, "replace", "live", path="other", memory_bytes=NEED // 2)
        # The new worker serves before the old one ends.
        wait_for(lambda: shown(system, "live")["num_ready"], 60)
        wait_for(lambda: len(before - set(system.info["pids"]["worker"])) == 1, 60)
        count = len(answered)
        wait_for(lambda: len(answered) > count + 20)
    assert shown(system, "live")["path"].endswith("/other")
    order(system, "unload", "live")
    wait_for(lambda: ask(system, "live", "x").json().get("error", {}).get("code") == "no_worker", 60)
    wait_for(lambda: "live" not in [model.id for model in system.client().models.list()])


def test_failed_replacement_leaves_the_old_model_serving(system: System) -> None:
    order(system, "load", "kept", path="good", memory_bytes=NEED // 2)
    wait_for_state(system, "kept", "awake")
    with load_on(lambda number: check(ask(system, "kept", f"kept {number}")), 2):
        order(system, "replace", "kept", path="broken", memory_bytes=NEED // 2)
        wait_for(lambda: shown(system, "kept")["path"].endswith("/good"), 60)
    assert "exited with code" in shown(system, "kept")["error"]
    assert shown(system, "kept")["num_ready"] == 1
    order(system, "unload", "kept")


def test_requests_wake_a_model_and_retry_after_comes_true(system: System) -> None:
    order(system, "load", "sleepy", path="good", on_demand=True, idle_s=60, memory_bytes=NEED // 2)
    wait_for_state(system, "sleepy", "awake")
    put_to_sleep(system, "sleepy")
    assert "sleepy" in [model.id for model in system.client().models.list()]
    predicted_s, began = shown(system, "sleepy")["ready_in_s"], time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(system, "sleepy", f"wake {number}"), range(12)))
    took_s = time.monotonic() - began
    # A machine that does much else loads more slowly than it did before.
    assert predicted_s / 4 < took_s < 4 * predicted_s + 5, (predicted_s, took_s)
    for answer in answers:
        check(answer)
    put_to_sleep(system, "sleepy")
    headers = system.headers()
    counted = httpx2.post(f"{system.url}/tokenize", headers=headers, json={"model": "sleepy", "prompt": "x"})
    assert (counted.status_code, counted.json()["error"]["code"]) == (503, "no_worker")
    assert "this call does not load it" in counted.json()["error"]["message"]
    assert shown(system, "sleepy")["state"] == "asleep"
    wakes = shown(system, "sleepy")["wakes"]
    job = {"id": "a-job", "model": "sleepy", "lane": "batch", "text": "x", "sampling": {"max_tokens": 3}}
    asyncio.run(publish_job(system, "hr.req.sleepy.batch.default", job))
    wait_for_state(system, "sleepy", "awake")
    assert shown(system, "sleepy")["wakes"] == wakes + 1
    put_to_sleep(system, "sleepy")
    refused = ask(system, "sleepy", "hurry", timeout=0.5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "waking")
    # The refusal woke it.
    wait_for(lambda: shown(system, "sleepy")["state"] in ("loading", "awake"), 60)
    wait_for_state(system, "sleepy", "awake")
    check(ask(system, "sleepy", "hurry", timeout=30))
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    order(system, "unload", "sleepy")


def test_requests_at_the_moment_of_falling_asleep_are_served_by_the_next_wake(system: System) -> None:
    order(system, "load", "dozing", path="good", on_demand=True, idle_s=1, memory_bytes=NEED // 2)
    wait_for_state(system, "dozing", "awake")
    numbers = random.Random(1)

    def starts() -> int:
        return system.log.read_text().count("starting, for dozing")

    def ask_after_a_pause(number: int) -> None:
        check(ask(system, "dozing", f"doze {number}"))
        # Around the moment at which the model is put to sleep.
        time.sleep(1.0 + 0.6 * numbers.random())

    with load_on(ask_after_a_pause, 1) as answered:
        wait_for(lambda: starts() >= 6, 120)
    assert len(answered) >= 5
    order(system, "unload", "dozing")


def test_two_models_that_are_always_busy_take_turns_and_retry_after_comes_true(system: System) -> None:
    def starts(name: str) -> int:
        return system.log.read_text().count(f"starting, for {name}")

    names = ("busy-left", "busy-right")
    for name in names:
        order(system, "load", name, path="good", on_demand=True, idle_s=60, memory_bytes=NEED)
    wait_for_state(system, "busy-left", "awake")
    with load_on(lambda number: check(ask(system, "busy-left", f"left {number}")), 3) as left:
        wait_for(lambda: len(left) > 3)
        wait_for(lambda: shown(system, "busy-right")["num_ready"] == 0, 60)
        refused, began = ask(system, "busy-right", "hurry", timeout=0.3), time.monotonic()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "waking")
        check(ask(system, "busy-right", "patient"))
        # A machine that does much else loads more slowly than it did before.
        assert time.monotonic() - began < int(refused.headers["retry-after"]) + 20
        with load_on(lambda number: check(ask(system, "busy-right", f"right {number}")), 3) as right:
            before, used = {name: starts(name) for name in names}, set()

            def have_had_turns() -> bool:
                used.update(host["used_bytes"] for host in operator(system, "").json()["hosts"])
                return all(starts(name) >= before[name] + 2 for name in names)

            wait_for(have_had_turns, 120)
            assert max(used) == NEED
            count = len(left), len(right)
            wait_for(lambda: len(left) > count[0] and len(right) > count[1], 60)
    for name in names:
        order(system, "unload", name)


def test_model_whose_files_are_bad_is_tried_once_and_its_requests_are_told(system: System) -> None:
    order(system, "load", "bad", path="broken", on_demand=True, memory_bytes=NEED // 2)
    waiting = ask(system, "bad", "x")
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "model_failed")
    wait_for_state(system, "bad", "failed")
    assert "exited with code" in shown(system, "bad")["error"]
    # Files of the host are told to its operator alone.
    assert "broken" not in waiting.text
    assert system.log.read_text().count("starting, for bad") == 1
    assert ask(system, "bad", "x").json()["error"]["code"] == "model_failed"
    order(system, "unload", "bad")


def test_host_of_its_own_serves_again_after_a_restart_and_is_missed_when_it_dies(
    system: System, models: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ops.cli", "host", "--nats-url", system.info["worker_nats_url"]]
    options = ["--host-name", "second", "--models-dir", str(models), "--state-dir", str(tmp_path / "state")]

    @contextmanager
    def host() -> Iterator[subprocess.Popen[bytes]]:
        environ = os.environ | {"HEADRACE_SIMULATE": "2"}
        with (tmp_path / "host.log").open("ab") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environ)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def states() -> dict[str, list[str]]:
        return {
            each["host"]: [model["state"] for model in each["models"]] for each in operator(system, "").json()["hosts"]
        }

    with host():
        wait_for(lambda: states().get("second") == [], 60)
        order(system, "load", "far", host="second", path="good")
        wait_for(lambda: states()["second"] == ["awake"], 60)
        check(ask(system, "far", "x"))
    with host() as second:
        wait_for(lambda: states().get("second") == ["awake"], 60)
        check(ask(system, "far", "x again"))
        second.kill()
        wait_for(lambda: "second" not in states(), 60)


def test_orders_are_refused_without_the_operators_key_and_outside_the_directories(system: System) -> None:
    url = system.info["metrics_url"].removesuffix("/metrics") + "/v1/hosted_models"
    for headers in ({}, system.headers()):
        assert httpx2.post(f"{url}/load", headers=headers, json={"name": "a", "path": "good"}).status_code == 401
        assert httpx2.get(url, headers=headers).status_code == 401
    assert httpx2.get(f"{system.url}/v1/hosted_models", headers=system.headers()).status_code == 404
    for path in ("/etc", "../..", "good/../../..", str(DEMO_MODEL)):
        answer = operator(system, "/load", {"name": "a", "path": path})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "order_refused")
        assert "is not under a directory" in answer.json()["error"]["message"]
    listed = json.dumps(operator(system, "").json())
    assert '"a"' not in listed


def streamed_ids(system: System, number: int) -> list[int]:
    """Return the tokens of a seeded answer in the order in which they came."""
    body = {"model": "headrace-demo", "prompt": f"def f{number}(self):", "max_tokens": 3 * TOKENS, "seed": number}
    body |= {"temperature": 1.0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    headers = {**system.headers(), "Cache-Control": "no-cache"}
    url = f"{system.url}/v1/completions"
    with httpx2.stream("POST", url, headers=headers, json=body, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    return [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice["token_ids"] or ()]


def test_streams_of_the_model_of_a_start_are_the_same_while_it_is_replaced_and_it_can_be_unloaded(
    models: Path, tmp_path: Path
) -> None:
    with running_system(tmp_path, "--workers", "2", "--models-dir", str(models)) as system:
        prompts = 6
        undisturbed = [streamed_ids(system, number) for number in range(prompts)]
        assert {len(ids) for ids in undisturbed} == {3 * TOKENS}
        started = set(system.info["pids"]["worker"])
        assert (shown(system, "headrace-demo")["state"], shown(system, "headrace-demo")["num_ready"]) == ("awake", 2)

        def ask_one(number: int) -> None:
            assert streamed_ids(system, number % prompts) == undisturbed[number % prompts]

        with load_on(ask_one, 4) as answered:
            wait_for(lambda: len(answered) > prompts, 60)
            order(system, "replace", "headrace-demo", path="other", workers=2)
            wait_for(lambda: not started & set(system.info["pids"]["worker"]), 120)
            count = len(answered)
            wait_for(lambda: len(answered) > count + prompts, 60)
        assert shown(system, "headrace-demo")["path"].endswith("/other")
        assert len(system.info["pids"]["worker"]) == 2
        order(system, "unload", "headrace-demo")
        wait_for(lambda: not system.info["pids"]["worker"], 60)
        order(system, "load", "headrace-demo", path="good")
        wait_for_state(system, "headrace-demo", "awake")
        assert streamed_ids(system, 0) == undisturbed[0]
        # What was ordered about it is not of the next start.
        assert json.loads((tmp_path / "state" / "models.json").read_bytes()) == []
