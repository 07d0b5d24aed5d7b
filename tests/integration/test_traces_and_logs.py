"""One request through the whole system, as its traces and its log lines tell of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.system import System, running_system
from tests.otlp_receiver import ReceivedSpan, Receiver, otlp_receiver
from tests.waiting import wait_for

PROMPT = "words that nobody else may read"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def observed(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Path]]:
    """A system that sends traces and logs JSON, and the folder of its logs."""
    folder = tmp_path_factory.mktemp("observed")
    arguments = ("--simulate", "5", "--otlp-endpoint", receiver.url, "--log-format", "json")
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with running_system(folder, *arguments, environ=environ) as system:
        yield system, folder / "state" / "logs"


def lines_of(path: Path, request_id: str) -> list[dict[str, Any]]:
    """Return the lines about the end of a request, which come a moment after its answer."""

    def found() -> list[dict[str, Any]]:
        every = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        return [line for line in every if line.get("request_id") == request_id and line["message"] == "request"]

    return wait_for(found)


def traced(system: System, receiver: Receiver, **options: Any) -> tuple[dict[str, list[ReceivedSpan]], str]:
    """Ask for something with a trace of the client's own; return the spans by name, and the request's id."""
    trace_id, request_id = secrets.token_hex(16), f"mine-{secrets.token_hex(4)}"
    headers = {"traceparent": f"00-{trace_id}-{'cd' * 8}-01", "x-request-id": request_id}
    with system.client().completions.with_streaming_response.create(
        model=system.model, prompt=PROMPT, max_tokens=8, extra_headers=headers, **options
    ) as response:
        response.read()
    return receiver.wait_for(2 + 3 * options.get("n", 1), trace_id), request_id


def test_request_is_one_trace_from_the_client_to_the_engine(observed: tuple[System, Path], receiver: Receiver) -> None:
    system, _ = observed
    spans, request_id = traced(system, receiver, stream=True, n=2)
    (root,) = spans[f"text_completion {system.model}"]
    assert root.parent_id == "cd" * 8
    assert (
        root.attributes
        | {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": system.model,
            "gen_ai.request.max_tokens": 8,
            "gen_ai.usage.output_tokens": 16,
            "headrace.request_id": request_id,
            "headrace.outcome": "completed",
            "http.response.status_code": 200,
        }
        == root.attributes
    )
    assert {name: len(found) for name, found in spans.items() if found != [root]} == {
        "admission": 1,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }
    for found in spans.values():
        assert all(span is root or span.parent_id == root.span_id for span in found)
    workers = {span.service for name in ("queue", "prefill", "decode") for span in spans[name]}
    assert (root.service, workers) == ("headrace-gateway", {"headrace-worker"})
    for decode in spans["decode"]:
        # How long seven more tokens take is told by another clock than the simulated steps have.
        assert decode.ended > decode.began
        assert decode.attributes["gen_ai.usage.output_tokens"] == 8
        assert decode.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert decode.attributes["headrace.request_id"] == request_id
    phases = sorted(spans["queue"] + spans["prefill"] + spans["decode"], key=lambda span: span.began)
    # One machine, one clock: all within the gateway's span, but for what passes while a process reads two clocks.
    assert root.began - 2e8 <= phases[0].began
    assert max(span.ended for span in phases) <= root.ended + 2e8
    assert PROMPT not in repr(spans)


def test_request_has_a_line_of_its_gateway_and_one_of_its_worker_under_one_id(
    observed: tuple[System, Path], receiver: Receiver
) -> None:
    system, logs = observed
    _, request_id = traced(system, receiver, stream=False)
    (line,) = lines_of(logs / "gateway.log", request_id)
    expected = {"route": "completion", "status": 200, "outcome": "completed", "tenant": "default", "stream": False}
    assert line | expected | {"model": system.model, "completion_tokens": 8, "role": "gateway"} == line
    assert 0 < line["admission_s"] <= line["ttft_s"] <= line["total_s"] < 60
    (at_worker,) = lines_of(logs / "worker-0.log", request_id)
    assert at_worker | {"outcome": "length", "lane": "interactive", "epoch": 0, "completion_tokens": 8} == at_worker
    assert at_worker["prompt_tokens"] == line["prompt_tokens"]
    assert 0 < at_worker["decode_s"] < line["total_s"]
    for log in logs.iterdir():
        assert PROMPT not in log.read_text()


def test_refused_request_has_a_line_that_says_why(observed: tuple[System, Path]) -> None:
    system, logs = observed
    request_id = f"mine-{secrets.token_hex(4)}"
    raw = system.client().completions.with_raw_response
    with pytest.raises(Exception, match="404"):
        raw.create(model="no-such-model", prompt=PROMPT, extra_headers={"x-request-id": request_id})
    (line,) = lines_of(logs / "gateway.log", request_id)
    assert (line["status"], line["outcome"], line["error"]) == (404, "refused", "model_not_found")
    assert "prompt_tokens" not in line
