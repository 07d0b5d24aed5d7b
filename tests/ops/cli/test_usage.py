"""`headrace usage`: complete over both lanes, and over restarts of the gateway."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace
from tests.ops.cli.jobs import publish
from tests.waiting import wait_for


def usage(system: System) -> dict[str, dict[str, int]]:
    """Return the totals of the tenant `default` by lane."""
    done = headrace("usage", "--json", "--state-dir", str(system.ready_file.parent / "state"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(each["tenant"], each["model"]) for each in found} <= {("default", "headrace-demo")}
    return {each["lane"]: each for each in found}


def usage_of(system: System, **requests: int) -> dict[str, dict[str, int]]:
    def counted() -> dict[str, dict[str, int]] | None:
        found = usage(system)
        return found if {lane: each["requests"] for lane, each in found.items()} == requests else None

    return wait_for(counted, 60, lambda: usage(system)) or {}


def ask(system: System) -> tuple[int, int]:
    """Return prompt and generated tokens of an answer that no cache has."""
    prompt = f"def f{time.time_ns()}():"
    told = system.client().completions.create(model=system.model, prompt=prompt, max_tokens=7).usage
    assert told is not None
    return told.prompt_tokens, told.completion_tokens


def test_tenant_without_usage_is_told(state_dir: Path) -> None:
    done = headrace("usage", "--tenant", "nosuch", "--state-dir", str(state_dir))
    assert (done.returncode, done.stderr) == (0, "headrace: there is no usage of a tenant 'nosuch'\n")


def test_usage_has_both_lanes_and_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    with running_system(tmp_path, "--simulate", "5") as system:
        state = ["--state-dir", str(tmp_path / "state")]
        # The request of `headrace up` counts for no tenant.
        answers = [ask(system) for _ in range(2)]
        (job,) = publish(tmp_path / "state", {"text": "def f():", "sampling": {"max_tokens": 9}}, wait=True)
        before = usage_of(system, interactive=2, batch=1)
        assert before["batch"]["completion_tokens"] == job["completion_tokens"] == 9
        assert before["batch"]["prompt_tokens"] == job["prompt_tokens"]
        for pid in system.info["pids"]["gateway"]:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while headrace("chat", "x", "--max-tokens", "1", *state).returncode:
            assert time.monotonic() < deadline
        # It is a job: a gateway takes it, and its worker counts it.
        system.client().responses.create(model=system.model, input="x", background=True, max_output_tokens=5)
        after = usage_of(system, interactive=3, batch=2)
        assert after["interactive"]["completion_tokens"] == sum(tokens for _, tokens in answers) + 1
        # The worker has generated a token for `headrace up`, too.
        generated = system.gauge("vllm:generation_tokens_total") - 1
        assert generated == sum(each["completion_tokens"] for each in after.values())
        while system.gauge("headrace_usage_completion_tokens_total") != generated:
            assert time.monotonic() < deadline + 60
            time.sleep(0.5)
