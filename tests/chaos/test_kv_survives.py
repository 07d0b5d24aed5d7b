"""Kill the worker between two turns: the next turn finds what the killed one had stored, and gives the same text.

What both APIs say of cached tokens, and the metrics of tiers, agree about it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace_here
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


def ask_as_anthropic_s_clients(system: System) -> dict[str, Any]:
    """Return the answer to a conversation that is retained; it has a prefix of its own."""
    body = {
        "model": system.model,
        "max_tokens": 8,
        "temperature": 0,
        "system": [{"type": "text", "text": CODE, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": "Explain it."}],
    }
    headers = {**system.headers(), "Cache-Control": "no-cache"}
    answer = httpx2.post(f"{system.url}/v1/messages", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_turn_after_a_kill_is_restored_from_the_disk(tmp_path: Path) -> None:
    with running_system(tmp_path, "--kv-disk-path", str(tmp_path / "kv")) as system:
        first, message = ask(system), ask_as_anthropic_s_clients(system)
        assert message["usage"]["cache_read_input_tokens"] == 0
        num_tokens = message["usage"]["input_tokens"]
        num_blocks, num_of_message = first.usage.prompt_tokens // 16, num_tokens // 16
        wait_for(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) >= num_blocks + num_of_message, 30)
        wait_for(lambda: system.gauge("headrace_worker_retained_blocks") >= num_of_message, 30)
        names = worker_names(system)
        killed = system.info["pids"]["worker"][0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: set(system.info["pids"]["worker"]) - {killed}, 60)
        # It looks at the disk while it starts to serve.
        wait_for(lambda: is_read(system, names), 60)
        again, repeated = ask(system), ask_as_anthropic_s_clients(system)
        assert again.choices[0].text == first.choices[0].text
        assert repeated["content"] == message["content"]
        assert min(first.usage.prompt_tokens, num_tokens) > 700
        cached = again.usage.prompt_tokens_details.cached_tokens
        read = repeated["usage"]["cache_read_input_tokens"]
        assert cached >= 0.98 * num_blocks * 16
        assert read >= 0.98 * num_of_message * 16
        assert read + repeated["usage"]["input_tokens"] == num_tokens
        wait_for(lambda: hits(system, "disk", names) == cached + read, 30)
        assert hits(system, "device", names) == 0
        ask(system)
        wait_for(lambda: hits(system, "device", names) == cached, 30)
        assert {tier: shown["hit_tokens"] for tier, shown in stats(system, names).items()} == {
            "device": cached,
            "host": 0,
            "disk": cached + read,
        }


def stats(system: System, others: set[str]) -> dict[str, Any]:
    """Return what `headrace cache stats` shows of each tier, of workers but `others`."""
    url = system.info["metrics_url"].removesuffix("/metrics")
    options = ("--operator-url", url, "--operator-key", system.info["operator_key"])
    done = headrace_here("cache", "stats", *options, "--json")
    assert done.returncode == 0, done.stderr
    rows = [dict[str, Any](json.loads(line)) for line in done.stdout.splitlines()]
    assert headrace_here("cache", "stats", *options).stdout.count("disk") >= 1
    return {row["tier"]: row for row in rows if row["worker"] not in others}


def hits(system: System, tier: str, others: set[str]) -> float:
    """Return the tokens that workers other than these have found in a tier."""
    name = "headrace_worker_kv_tier_hit_tokens_total{"
    lines = [line for line in system.metrics().splitlines() if line.startswith(name) and f'tier="{tier}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if not any(other in line for other in others))


def worker_names(system: System) -> set[str]:
    return set(re.findall(r'^headrace_worker_\w+\{.*worker="([^"]+)"', system.metrics(), re.MULTILINE))


def is_read(system: System, others: set[str]) -> bool:
    """Return whether a worker other than these knows what is on the disk."""
    lines = [line for line in system.metrics().splitlines() if line.startswith("headrace_worker_kv_tier_used_bytes{")]
    own = [line for line in lines if 'tier="disk"' in line and not any(name in line for name in others)]
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in own)
