"""Settings as the page shows them: without secrets, and otherwise as they are."""

from __future__ import annotations

from ops.doctor.finding import page
from ops.doctor.settings import place_of, setting_findings, shown_value


def test_url_without_secrets_is_shown_as_it_is() -> None:
    for url in ("http://h:4318/v1/traces", "nats://a:4222,nats://b:4222", "tls://[::1]:4222"):
        assert shown_value("HEADRACE_OTLP_ENDPOINT", url) == url
    assert place_of("nats://u:p@a:1,tls://b:2") == "a:1, b:2"
    assert shown_value("HEADRACE_MODEL", "Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B@main"


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert shown_value("HEADRACE_API_KEY", "hr-1") == "(hidden)"
    assert shown_value("HEADRACE_NATS_PASSWORD", "") == "(empty)"
    assert shown_value("HEADRACE_KEYS_FILE", "/a/keys.json") == "/a/keys.json"
    assert shown_value("HEADRACE_NATS_URL", "nats://u:p@a:4222,nats://u:p@b:4222").count("(hidden)@") == 2
    assert "secret" not in page(
        list(setting_findings({"HEADRACE_REDIS_URL": "redis://:secret@h/0", "HF_TOKEN": "secret"})), str
    )
