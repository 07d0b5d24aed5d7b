"""What a gateway's settings are refused for, before it binds a port, asks a server or forks.

Several processes are forked by a parent that starts each anew when it ends: what one of them refused it would refuse
for ever, in a log that nobody reads.
"""

from __future__ import annotations

from pathlib import Path

from gateway.admission.auth import KeyStore, check_auth_settings
from gateway.admission.operator_access import check_operator_settings
from gateway.api.cross_origin import CrossOrigin
from gateway.cache.redis_url import check_redis_url
from gateway.config import GatewayConfig
from gateway.http1.tls import server_tls
from gateway.metrics import GatewayMetrics
from gateway.responses.seal_secrets import read_secrets
from shared.nats_files import identity_options, is_tls_required, tls_context
from shared.nats_url import check_url
from shared.tracing import check_endpoint


def check_settings(config: GatewayConfig) -> None:
    """Refuse settings with which no gateway could serve.

    Raises:
        ConfigError: They are of that kind; it names the setting.
    """
    check_operator_settings(config)
    server_tls(config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
    check_auth_settings(asks_for_key=config.auth, host=config.host)
    keys_file = Path(config.keys_file) if config.keys_file else None
    KeyStore(keys_file, config.api_key, GatewayMetrics(), asks_for_key=config.auth)
    CrossOrigin(config.cors_origins or "")
    read_secrets(config.responses_secret)
    check_endpoint(config.otlp_endpoint)
    check_redis_url(config.redis_url)
    check_url(config.nats_url)
    identity_options(config)
    if is_tls_required(config.nats_url, config):
        tls_context(config)
