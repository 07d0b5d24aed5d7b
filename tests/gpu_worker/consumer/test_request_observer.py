"""Lines and spans of requests at the worker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_observer import RequestObserver
from gpu_worker.core.sequence import Sequence
from shared.messages import Lane, Request
from shared.request_log import SLOW_S, RequestLog
from shared.sampling import Sampling

MESSAGE = QueuedMessage("s", b"", "ack", 1, 1, 0)


class Told(RequestLog):
    """Keeps lines and spans."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        self.spans: dict[str, tuple[float, float, dict[str, Any], str | None]] = {}

    def write(self, message: str, fields: Any, kind: Any = "request") -> None:
        self.kinds.append(kind)
        self.lines.append(dict(fields()))

    def add(
        self, name: str, parent: str, began: float, ended: float, attributes: Any, error: str | None = None
    ) -> None:
        assert parent == "parent"
        self.spans[name] = (began, ended, dict(attributes), error)


def removed(traceparent: str | None = "parent", *, has_run: bool, outcome: str, has_output: bool = True) -> Told:
    """Tell of a request that came 10 s ago after 2 s on its way, began to run 7 s ago and to answer 4 s ago."""
    told, now = Told(), time.monotonic()
    request = Request(id="r", model="m", tenant="t", epoch=3, trace="req_1", traceparent=traceparent)
    held = HeldRequest("r", request, MESSAGE, outcome=outcome, taken_at=now - 10, queued_s=2.0)
    if has_run:
        held.sequence = Sequence("r.1", [1, 2, 3, 4, 5], 3, Sampling(), 9, num_cached_tokens=2, num_preemptions=1)
        held.sequence.scheduled_at = now - 7
        held.first_output_at = now - 4 if has_output else None
    RequestObserver(told, "w", told).removed(held)  # type: ignore[arg-type]
    return told


def test_line_says_what_ran_and_for_how_long() -> None:
    [line] = removed(has_run=True, outcome="stop").lines
    times = {name: line.pop(name) for name in ("held_s", "waited_s", "prefill_s", "decode_s")}
    assert times == pytest.approx({"held_s": 10, "waited_s": 3, "prefill_s": 3, "decode_s": 4}, abs=0.5)
    assert line == {
        "request_id": "req_1", "id": "r", "epoch": 3, "lane": "interactive", "tenant": "t", "outcome": "stop",
        "prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 2,
    }  # fmt: skip


def test_spans_follow_each_other_from_the_queue_to_the_last_token() -> None:
    spans = removed(has_run=True, outcome="length").spans
    assert list(spans) == ["queue", "prefill", "decode"]
    assert [ended - began for began, ended, _, _ in spans.values()] == pytest.approx([5, 3, 4], abs=0.5)
    assert spans["queue"][1] == spans["prefill"][0]
    assert spans["prefill"][1] == spans["decode"][0]
    names = {
        "gen_ai.request.model": "m", "headrace.request_id": "req_1", "headrace.sequence_id": "r",
        "headrace.worker": "w", "headrace.epoch": 3, "headrace.lane": "interactive",
    }  # fmt: skip
    assert [attributes for _, _, attributes, _ in spans.values()] == [
        names,
        names | {"gen_ai.usage.input_tokens": 3, "headrace.cached_tokens": 2},
        names | {
            "gen_ai.usage.output_tokens": 2, "gen_ai.response.finish_reasons": ["length"], "headrace.preemptions": 1,
        },
    ]  # fmt: skip
    assert {error for *_, error in spans.values()} == {None}


@pytest.mark.parametrize(
    ("has_run", "has_output", "names"),
    [(False, False, ["queue"]), (True, False, ["queue", "prefill"]), (True, True, ["queue", "prefill", "decode"])],
)
def test_failure_is_told_by_the_last_span(has_run: bool, has_output: bool, names: list[str]) -> None:
    spans = removed(has_run=has_run, has_output=has_output, outcome="failed").spans
    assert list(spans) == names
    assert [error is not None for *_, error in spans.values()] == [name == names[-1] for name in names]


def test_request_without_a_parent_has_a_line_and_no_spans() -> None:
    told = removed(traceparent=None, has_run=True, outcome="stop")
    assert (len(told.lines), told.spans) == (1, {})


@pytest.mark.parametrize(
    ("lane", "outcome", "held_s", "kind"),
    [
        ("interactive", "stop", 1.0, "request"),
        ("interactive", "stop", SLOW_S, "problem"),
        ("interactive", "failed", 1.0, "problem"),
        ("batch", "stop", SLOW_S, "batch"),
        ("batch", "expired", 1.0, "problem"),
    ],
)
def test_jobs_and_requests_that_failed_or_were_slow_have_lines_of_their_own(
    lane: Lane, outcome: str, held_s: float, kind: str
) -> None:
    told = Told()
    request = Request(id="r", model="m", lane=lane)
    held = HeldRequest("r", request, MESSAGE, outcome=outcome, taken_at=time.monotonic() - held_s, queued_s=0.0)
    RequestObserver(told, "w", None).removed(held)
    assert told.kinds == [kind]
