"""The gateway's settings through `resolve`."""

from __future__ import annotations

import dataclasses

import pytest

from gateway.config import GatewayConfig
from shared.config import resolve
from shared.errors import ConfigError


def test_defaults_are_loopback_and_without_optional_servers() -> None:
    config = resolve(GatewayConfig, {}, {})
    assert (config.host, config.operator_host, config.redis_url, config.api_key) == (
        "127.0.0.1",
        "127.0.0.1",
        None,
        None,
    )


def test_environment_is_read_and_explicit_values_win() -> None:
    environ = {"HEADRACE_PORT": "0", "HEADRACE_REDIS_URL": "redis://r", "HEADRACE_KEYS_FILE": "keys.json"}
    config = resolve(GatewayConfig, {"port": 9}, environ)
    assert (config.port, config.redis_url, config.keys_file) == (9, "redis://r", "keys.json")


@pytest.mark.parametrize(
    ("variable", "value"), [("PORT", "70000"), ("PROCESSES", "0"), ("MAX_BODY_BYTES", "1"), ("SEND_TIMEOUT_S", "nan")]
)
def test_value_out_of_bounds_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"HEADRACE_{variable}"):
        resolve(GatewayConfig, {}, {f"HEADRACE_{variable}": value})


def test_secrets_are_marked_so_that_help_does_not_show_them() -> None:
    marked = {f.name for f in dataclasses.fields(GatewayConfig) if f.metadata["setting"].secret}
    assert marked == {"api_key", "probe_key", "nats_password", "operator_key", "redis_url", "responses_secret"}
