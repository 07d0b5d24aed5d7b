from __future__ import annotations

import dataclasses

import pytest

from gateway.config import GatewayConfig
from gateway.process.settings_check import check_settings
from shared.errors import ConfigError

CONFIG = GatewayConfig(
    host="127.0.0.1", port=8000, operator_host="127.0.0.2", operator_port=8001, operator_key="k" * 16, api_key="sk-1"
)


def test_settings_with_which_a_gateway_can_serve_pass() -> None:
    check_settings(CONFIG)


@pytest.mark.parametrize(
    ("host", "operator_host"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "::")],
)
def test_one_port_of_one_host_for_both_is_refused(host: str, operator_host: str) -> None:
    config = dataclasses.replace(CONFIG, host=host, operator_host=operator_host, operator_port=8000)
    with pytest.raises(ConfigError, match=r"HEADRACE_OPERATOR_PORT.* 8000 is HEADRACE_PORT too"):
        check_settings(config)


@pytest.mark.parametrize(
    "ports",
    # Two addresses of one machine; and two free ports that the system chooses.
    [{"port": 8000, "operator_port": 8000}, {"port": 0, "operator_port": 0, "operator_host": "127.0.0.1"}],
)
def test_ports_that_both_can_have_pass(ports: dict[str, object]) -> None:
    check_settings(dataclasses.replace(CONFIG, **ports))  # type: ignore[arg-type]
