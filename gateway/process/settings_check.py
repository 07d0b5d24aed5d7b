"""Checks a gateway's settings before it binds a port, contacts a server or forks.

Several processes are forked by a parent that starts each anew when it ends: what one of them refused it would refuse
for ever, in an unread log.
"""

from __future__ import annotations

from pathlib import Path

from gateway.admission.api_keys import list_keys
from gateway.admission.auth import KeyStore, check_auth_settings, is_loopback
from gateway.api.door import CrossOrigin
from gateway.cache.redis_client import check_redis_url
from gateway.config import GatewayConfig, read_secrets
from gateway.http1.server import server_tls
from gateway.media.fetch import AllowedHosts
from gateway.metrics import GatewayMetrics
from shared.errors import ConfigError
from shared.nats_files import identity_options, is_tls_required, tls_context
from shared.objects.open import check_store
from shared.tracing import check_endpoint
from shared.urls import check_url

MIN_OPERATOR_KEY_CHARACTERS = 16

_ALL_ADDRESSES = ("0.0.0.0", "::")


def check_settings(config: GatewayConfig) -> None:
    """Refuse settings with which no gateway could serve by a `ConfigError` that names the setting."""
    check_operator_settings(config)
    _check_ports_differ(config)
    server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    check_auth_settings(asks_for_key=config.auth, host=config.host)
    keys_file = Path(config.keys_file) if config.keys_file else None
    if keys_file is not None:
        # A file that may not be looked at is not a file that is yet to be made.
        list_keys(keys_file)
    KeyStore(keys_file, config.api_key, GatewayMetrics(), asks_for_key=config.auth)
    CrossOrigin(config.cors_origins or "")
    AllowedHosts.read(config.image_hosts)
    read_secrets(config.responses_secret)
    for place, variable in ((config.files, "HEADRACE_FILES"), (config.adapters, "HEADRACE_ADAPTERS")):
        if place is not None:
            check_store(place, variable)
    check_endpoint(config.otlp_endpoint)
    check_redis_url(config.redis_url)
    check_url(config.nats_url)
    identity_options(config)
    if is_tls_required(config.nats_url, config):
        tls_context(config)


def _check_ports_differ(config: GatewayConfig) -> None:
    """Refuse one port for both: both sockets can be bound to it, and the second one fails when it listens."""
    hosts = {config.host, config.operator_host}
    is_one_host = len(hosts) == 1 or not hosts.isdisjoint(_ALL_ADDRESSES)
    if config.port and config.port == config.operator_port and is_one_host:
        problem = f"{config.port} is HEADRACE_PORT too; choose another for one of them"
        raise ConfigError("HEADRACE_OPERATOR_PORT", problem)


def check_operator_settings(config: GatewayConfig) -> None:
    """Refuse an operator's port without a key, unless chosen so on loopback, or with a short one: `ConfigError`."""
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
    if config.operator_key and len(config.operator_key) < MIN_OPERATOR_KEY_CHARACTERS:
        raise ConfigError("HEADRACE_OPERATOR_KEY", f"has fewer than {MIN_OPERATOR_KEY_CHARACTERS} characters")
