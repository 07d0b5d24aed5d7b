"""Who may use the operator's port, as far as the settings say."""

from __future__ import annotations

from gateway.admission.auth import is_loopback
from gateway.config import GatewayConfig
from shared.errors import ConfigError

MIN_KEY_CHARACTERS = 16


def check_operator_settings(config: GatewayConfig) -> None:
    """See to it that the operator's port, if there is one, has a key, or is on loopback and chosen to have none.

    Raises:
        ConfigError: It has neither, or the key is too short.
    """
    if config.operator_port is None:
        return
    if config.operator_without_key and config.operator_key:
        raise ConfigError("HEADRACE_OPERATOR_WITHOUT_KEY", "contradicts HEADRACE_OPERATOR_KEY; set only one of them")
    if config.operator_without_key and not is_loopback(config.operator_host):
        problem = f"allowed only on loopback, and HEADRACE_OPERATOR_HOST is {config.operator_host}"
        raise ConfigError("HEADRACE_OPERATOR_WITHOUT_KEY", problem)
    if not config.operator_without_key and not config.operator_key:
        problem = "not set, but the operator's port needs one (on loopback, HEADRACE_OPERATOR_WITHOUT_KEY=true)"
        raise ConfigError("HEADRACE_OPERATOR_KEY", problem)
    if config.operator_key and len(config.operator_key) < MIN_KEY_CHARACTERS:
        raise ConfigError("HEADRACE_OPERATOR_KEY", f"has fewer than {MIN_KEY_CHARACTERS} characters")
