"""What tells of requests is made of the settings, and sends what is left when the process ends."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from gateway.config import GatewayConfig
from gateway.process import observing as observing_module
from gateway.process.observing import observing
from shared.errors import ConfigError
from shared.tracing import Tracing


class Provider:
    """Counts how often it is told to send what is left."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def force_flush(self, timeout_ms: int) -> None:
        self.calls.append("flush")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


async def test_traces_are_made_in_the_name_of_the_process_and_sent_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider()
    tracing = Tracing(cast("Any", provider), cast("Any", None))
    asked: list[tuple[object, ...]] = []

    def make(*arguments: object) -> Tracing:
        asked.append(arguments)
        return tracing

    monkeypatch.setattr(observing_module, "make_tracing", make)
    config = GatewayConfig(otlp_endpoint="http://collector:4318", trace_ratio=0.25, request_log_per_s=3.0)
    async with observing(config, 7) as observer:
        assert observer._tracing is tracing
        assert not observer._logs_prompts
        assert provider.calls == []
    assert provider.calls == ["flush", "shutdown"]
    ((endpoint, ratio, role, instance),) = asked
    assert (endpoint, ratio, role) == ("http://collector:4318", 0.25, "gateway")
    assert str(instance).endswith(f"-{os.getpid()}-7")


async def test_without_traces_there_is_the_log_alone() -> None:
    async with observing(GatewayConfig(log_prompts=True), 0) as observer:
        assert observer._tracing is None
        assert observer._logs_prompts


async def test_endpoint_that_cannot_be_used_is_named_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_OTLP_ENDPOINT"):
        async with observing(GatewayConfig(otlp_endpoint="collector"), 0):
            pass
