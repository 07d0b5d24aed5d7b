"""Kill the worker between two turns: the next turn finds what the killed one had stored, and gives the same text."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.chaos]

CODE = "\n".join(f"def function_{number}(value):\n    return value * {number} + {number % 7}\n" for number in range(45))


def ask(system: System) -> Any:
    return system.client().completions.create(
        model=system.model,
        prompt=CODE,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers={"Cache-Control": "no-cache"},
    )


def test_a_turn_after_a_kill_is_restored_from_the_disk(tmp_path: Path) -> None:
    with running_system(tmp_path, "--kv-disk-path", str(tmp_path / "kv")) as system:
        first = ask(system)
        num_blocks = first.usage.prompt_tokens // 16
        wait_for(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) >= num_blocks, 30)
        names = worker_names(system)
        killed = system.info["pids"]["worker"][0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: set(system.info["pids"]["worker"]) - {killed}, 60)
        # It looks at the disk while it starts to serve.
        wait_for(lambda: is_read(system, names), 60)
        again = ask(system)
        assert again.choices[0].text == first.choices[0].text
        assert first.usage.prompt_tokens > 700
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= 0.98 * num_blocks * 16
        wait_for(lambda: system.gauge("headrace_worker_kv_tier_hit_tokens_total") == cached, 30)


def worker_names(system: System) -> set[str]:
    return set(re.findall(r'^headrace_worker_\w+\{.*worker="([^"]+)"', system.metrics(), re.MULTILINE))


def is_read(system: System, others: set[str]) -> bool:
    """Say whether a worker other than these knows what is on the disk."""
    lines = [line for line in system.metrics().splitlines() if line.startswith("headrace_worker_kv_tier_used_bytes{")]
    own = [line for line in lines if 'tier="disk"' in line and not any(name in line for name in others)]
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in own)
