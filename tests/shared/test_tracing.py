"""Spans: off without an endpoint, named below their parents, with times that were noted earlier."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from shared.errors import ConfigError
from shared.tracing import Tracing, check_endpoint, make_tracing, traceparent
from tests.otlp_receiver import otlp_receiver

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def make(endpoint: str, ratio: float = 1.0) -> Tracing:
    tracing = make_tracing(endpoint, ratio, "gateway", "test")
    assert tracing is not None
    return tracing


def test_without_an_endpoint_nothing_is_made_and_nothing_imported() -> None:
    code = (
        "import sys; import gateway.process.gateway, gpu_worker.start.worker; from shared.tracing import make_tracing;"
        "assert make_tracing(None, 1.0, 'worker', 'w') is None;"
        # Redis's client measures itself with OpenTelemetry where that is installed, but makes no traces.
        "makers = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'google.protobuf');"
        "assert not [name for name in sys.modules if name.startswith(makers)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_span_of_a_request_is_below_its_clients_and_others_are_below_it() -> None:
    with otlp_receiver() as receiver:
        tracing = make(receiver.url + "/")
        span = tracing.begin("chat", PARENT)
        name = traceparent(span)
        now = time.monotonic()
        tracing.add("admission", name, now - 2, now - 1, {"a": 1, "left.out": None})
        tracing.add("decode", name, now - 1, now, {"list": ["x"]}, "it failed")
        tracing.end(span, "chat m", {"gen_ai.request.model": "m"}, None)
        tracing.close()
        spans = receiver.wait_for(3, "ab" * 16)
    (root,), (admission,), (decode,) = spans["chat m"], spans["admission"], spans["decode"]
    assert root.parent_id == "cd" * 8
    assert admission.parent_id == decode.parent_id == root.span_id
    assert (admission.attributes, decode.attributes) == ({"a": 1}, {"list": ["x"]})
    assert (root.is_error, decode.is_error) == (False, True)
    assert admission.ended - admission.began == pytest.approx(1e9, abs=1e7)
    assert abs(decode.ended - time.time_ns()) < 10e9
    assert root.service == "headrace-gateway"


def test_what_is_not_sampled_is_named_all_the_same_and_sent_nowhere() -> None:
    with otlp_receiver() as receiver:
        tracing = make(receiver.url, ratio=0.0)
        fresh = tracing.begin("chat", None)
        chosen = tracing.begin("chat", PARENT)
        assert int(traceparent(fresh)[-2:], 16) & 1 == 0
        # The client has decided that its trace is kept.
        assert int(traceparent(chosen)[-2:], 16) & 1 == 1
        tracing.add("decode", traceparent(fresh), 0.0, 1.0, {})
        tracing.end(fresh, "chat m", {}, None)
        tracing.end(chosen, "chat m", {}, None)
        tracing.close()
        assert [span.trace_id for span in receiver.spans] == ["ab" * 16]


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01", PARENT + "-x"])
def test_parent_that_is_none_begins_a_new_trace(parent: str) -> None:
    tracing = make("http://127.0.0.1:9")
    span = tracing.begin("chat", parent)
    assert "ab" * 16 not in traceparent(span)
    assert len(traceparent(span)) == len(PARENT)


def test_endpoint_that_is_no_url_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_OTLP_ENDPOINT.*http://"):
        make_tracing("collector:4317", 1.0, "worker", "w")


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[tracing\]'"):
        make_tracing("http://x", 1.0, "worker", "w")


def test_endpoint_may_be_reached_over_tls() -> None:
    check_endpoint("https://collector:4318/v1/traces")
    with pytest.raises(ConfigError):
        check_endpoint("ftp://collector:4318/v1/traces")
