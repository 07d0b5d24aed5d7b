"""What operators and tenants see of requests in a running system: receipts that add up, timelines, live figures."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared.usage_ledger import DAYS_KEPT
from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace
from tests.ops.cli.jobs import publish
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("seen")
    prices = {"HEADRACE_DEVICE_HOUR_COST": "3600"}
    with running_system(directory, "--simulate", "5", "--workers", "2", environ=prices) as system:
        yield system


def state(system: System) -> list[str]:
    return ["--state-dir", str(system.ready_file.parent / "state")]


def told(system: System, path: str) -> dict[str, Any]:
    """Return what the operator's port tells."""
    return dict(system.operator(f"/console/api/{path}").json())


def now(system: System) -> dict[str, Any]:
    return told(system, "now")


def ask(system: System, request_id: str, max_tokens: int, *, leaves_after: int | None = None) -> None:
    """Ask for a streamed answer that no cache has; a client that leaves reads so many chunks."""
    body = {"model": system.model, "prompt": f"def f{time.time_ns()}():" * 8, "max_tokens": max_tokens, "stream": True}
    headers = system.headers() | {"x-request-id": request_id}
    options = {"headers": headers, "json": body | {"ignore_eos": True, "temperature": 1}, "timeout": 60}
    with httpx2.stream("POST", f"{system.url}/v1/completions", **options) as answer:  # type: ignore[arg-type]
        assert answer.status_code == 200
        for number, _ in enumerate(answer.iter_lines()):
            if leaves_after is not None and number > leaves_after:
                return


def device_s(system: System) -> float:
    """Return the device time of the one tenant that NATS has added up."""
    answer = httpx2.get(f"{system.url}/v1/usage", headers=system.headers())
    return sum(float(each["device_seconds"]) for each in answer.json()["data"])


def busy_s(system: System) -> float:
    return sum(float(worker["busy_s"]) for worker in now(system)["workers"])


def test_receipts_of_random_requests_add_up_to_what_the_workers_were_busy(system: System) -> None:
    draw = random.Random(7)
    leaving = [draw.randint(2, 30) if draw.random() < 0.2 else None for _ in range(30)]
    plans = [(f"load-{number}", draw.randint(2, 60), leaves_after) for number, leaves_after in enumerate(leaving)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda plan: ask(system, plan[0], plan[1], leaves_after=plan[2]), plans):
            pass
    publish(Path(state(system)[1]), {"text": "def f():", "sampling": {"max_tokens": 20}}, wait=True)

    def is_idle() -> bool:
        return all(not worker["running"] for worker in now(system)["workers"])

    wait_for(is_idle)
    # What a heartbeat tells is half a second old at most, and usage is sent every five seconds.
    wait_for(lambda: abs(device_s(system) / busy_s(system) - 1) < 0.01, 60, lambda: (device_s(system), busy_s(system)))


def test_tenant_reads_its_own_usage_and_prices_it(system: System) -> None:
    ask(system, "priced", 5)
    http = httpx2.Client(base_url=system.url, headers=system.headers())

    def usage(**query: str) -> dict[str, Any]:
        answer = http.get("/v1/usage", params=query)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    with http:
        (total,) = wait_for(lambda: [each for each in usage()["data"] if each["lane"] == "interactive"], 60)
        assert total["cost"] == pytest.approx(total["device_seconds"])
        tokens = total["prompt_tokens"] + total["completion_tokens"]
        assert total["cost_per_million_tokens"] == pytest.approx(1e6 * total["cost"] / tokens)
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        assert usage(start=today)["data"][0]["requests"] >= 1
        oldest = f"{datetime.now(UTC) - timedelta(days=DAYS_KEPT):%Y-%m-%d}"
        assert usage(start=oldest, end=oldest)["data"] == []
        for wrong in (
            f"start={oldest}&start={today}",
            "start=2020-01-01&end=2020-01-02",
            "start=0001-01-01&end=0001-01-02",
        ):
            refused = http.get(f"/v1/usage?{wrong}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "start")
        answer = http.get("/v1/organization/usage/completions", params={"start_time": int(time.time()) - 86400})
        page = answer.json()
        assert [bucket["object"] for bucket in page["data"]] == ["bucket"] * 2
        (result,) = page["data"][-1]["results"]
        assert result["input_tokens"] >= total["prompt_tokens"]
        hourly = {"start_time": int(time.time()) - 7200, "bucket_width": "1h"}

        def is_told_by_hours() -> bool:
            hours = http.get("/v1/organization/usage/completions", params=hourly).json()["data"]
            assert [each["end_time"] - each["start_time"] for each in hours] == [3600] * len(hours)
            told = sum(each["input_tokens"] for hour in hours for each in hour["results"])
            return told >= int(total["prompt_tokens"])

        wait_for(is_told_by_hours, 60)
        for_ever = {"start_time": int(time.time()) - 86400, "end_time": 253_402_300_799, "limit": 1}
        answer = http.get("/v1/organization/usage/completions", params=for_ever)
        del for_ever["limit"]
        last = {**for_ever, "page": answer.json()["next_page"]}
        answer = http.get("/v1/organization/usage/completions", params=last)
        assert (len(answer.json()["data"]), answer.json()["has_more"]) == (1, False), "no days after today"
        grouped = {"start_time": int(time.time()), "group_by[]": ["model"], "limit": 1}
        answer = http.get("/v1/organization/usage/completions", params=grouped)
        assert answer.json()["data"][0]["results"][0]["model"] == system.model
        late = {"start_time": int(time.time()) - 7 * 86400, "bucket_width": "1h"}
        answer = http.get("/v1/organization/usage/completions", params={**late, "page": late["start_time"] - 7200})
        assert answer.json()["data"][0]["start_time"] >= late["start_time"] // 3600 * 3600, "hours ended between pages"
        for query, param in (
            ({}, "start_time"),
            ({"start_time": 1}, "start_time"),
            ({"start_time": 1, "bucket_width": "1m"}, "bucket_width"),
        ):
            refused = http.get("/v1/organization/usage/completions", params=query)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_request_that_lost_its_worker_says_so(system: System) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, system, "unlucky", 800)

        def holder() -> str | None:
            views = told(system, "requests/unlucky").get("requests", [])
            lives = [life for view in views for life in view["timeline"].get("sequences", [])]
            return lives[0]["attempts"][-1].get("worker") if lives else None

        worker = wait_for(holder)
        (pid,) = [each["pid"] for each in now(system)["workers"] if each["worker"] == worker]
        os.kill(pid, signal.SIGKILL)
        asked.result(60)
    shown = headrace("request", "unlucky", *state(system))
    assert shown.returncode == 0, shown.stderr
    assert "attempt 1, because its worker died" in shown.stdout
    assert f"attempt 0 {worker}" in shown.stdout
    assert "an attempt whose worker did not tell is not in it" in shown.stdout
    listed = headrace("request", "--slow", *state(system))
    assert "unlucky" in listed.stdout


def test_job_and_line_of_a_batch_show_their_worker_and_receipt(system: System, tmp_path: Path) -> None:
    (job,) = publish(Path(state(system)[1]), {"text": "def g():", "sampling": {"max_tokens": 9}}, wait=True)
    body = {"model": system.model, "prompt": "x", "max_tokens": 9, "n": 2, "temperature": 1}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    (file := tmp_path / "batch.jsonl").write_text(json.dumps(line))
    submitted = headrace("batch", *state(system), "submit", str(file), "--watch")
    batch = json.loads(submitted.stdout.splitlines()[-1])
    output = json.loads(headrace("batch", *state(system), "results", batch["id"]).stdout)
    for request_id, tokens in ((job["id"], job["completion_tokens"]), (output["id"], 18)):
        shown = headrace("request", request_id, *state(system))
        assert shown.returncode == 0, shown.stderr
        assert "the job was published" in shown.stdout
        assert "claimed by worker-" in shown.stdout
        assert f"{tokens} generated" in shown.stdout
        assert "device 0.0 ms" not in shown.stdout


def test_requests_of_one_id_are_all_shown_with_what_each_took(system: System) -> None:
    with ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(ask, system, "same", max_tokens) for max_tokens in (20, 30)]:
            asked.result(60)
    ask(system, "same", 40)

    def ended() -> list[dict[str, Any]]:
        return [view for view in told(system, "requests/same")["requests"] if view["timeline"].get("sequences")]

    views = wait_for(lambda: found if len(found := ended()) == 3 else None)
    assert sorted(view["receipt"]["completion_tokens"] for view in views) == [20, 30, 40]
    for view in views:
        (life,) = view["timeline"]["sequences"]
        assert life["attempts"][-1]["tokens"] == view["receipt"]["completion_tokens"]
        assert view["receipt"]["device_ms"] > 0


@pytest.mark.parametrize("path", ["requests/none", "tenants", "dead-letters", "now", "requests"])
def test_console_refuses_parameters_that_it_does_not_know(system: System, path: str) -> None:
    assert told(system, f"{path}?x=1")["error"]["param"] == "x"


def test_request_that_nobody_knows_is_an_error_with_its_reasons(system: System) -> None:
    done = headrace("request", "no/such", *state(system))
    assert done.returncode == 1
    assert "No gateway keeps a request 'no/such'" in done.stderr


def test_top_shows_workers_and_their_speed(system: System) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, system, "long", 800)
        done = headrace("top", "--once", "--interval-s", "1", *state(system))
        asked.result(60)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("worker-")]
    assert rows
    assert sum(int(row[5]) for row in rows) > 0
