"""The gateway's settings. Resolved once at start by `shared.config.resolve`, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.audit import AUDIT_HELP
from shared.bounds import MAX_IMAGE_BYTES, MAX_IMAGES
from shared.config import setting
from shared.errors import ConfigError
from shared.nats_files import NatsFiles
from shared.request_log import DEFAULT_PER_S, LOG_FORMAT_HELP, REQUEST_LOG_HELP
from shared.telemetry import FORMATS
from shared.tracing import ENDPOINT_HELP, RATIO_HELP

PROBE_KEY_ID = "probe"
"""Id of the key of `GatewayConfig.probe_key`, whose requests count for no tenant."""


@dataclass(frozen=True, slots=True)
class GatewayConfig(NatsFiles):
    """Everything an operator can choose about a gateway. Sizes are bytes, times seconds."""

    host: str = setting("127.0.0.1", "Address the public port listens on.")
    port: int = setting(8000, "Public port; 0 takes a free one.", minimum=0, maximum=65535)
    processes: int = setting(1, "Gateway processes that share the port.", minimum=1, maximum=256)
    operator_host: str = setting("127.0.0.1", "Address of the operator's port: metrics and detailed health.")
    operator_port: int | None = setting(
        None, "Operator's port, one for all processes; 0 takes a free one, none if not given.", minimum=0, maximum=65535
    )
    operator_key: str | None = setting(None, "Key of the operator's port, shown as a bearer token.", secret=True)
    operator_without_key: bool = setting(False, "Ask for no key on the operator's port; allowed on loopback only.")

    tls_cert_file: Path | None = setting(
        None, "Certificate (PEM, with its chain) of both ports, which then speak HTTPS alone."
    )
    tls_key_file: Path | None = setting(None, "Key (PEM) of that certificate, unless it is in the same file.")
    tls_client_ca_file: Path | None = setting(
        None, "Authorities (PEM) that a client's certificate must come from; clients without one are refused."
    )

    nats_url: str = setting("nats://127.0.0.1:4222", "NATS servers, separated by commas.")
    nats_user: str | None = setting(None, "NATS user of the gateway role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    redis_url: str | None = setting(
        None,
        "Redis for the response cache and limits that gateways share; without it no cache, and own limits.",
        secret=True,
    )
    redis_timeout_s: float = setting(0.025, "A slower Redis call counts as a miss.", minimum=0.001, maximum=5)

    keys_file: str | None = setting(None, "API keys, written by `headrace keys`; re-read when it changes.")
    api_key: str | None = setting(None, "One more key, unlimited, of the tenant `default`.", secret=True)
    probe_key: str | None = setting(
        None,
        "A key for a program that checks that models answer: unlimited, and its answers count for no tenant.",
        secret=True,
    )

    responses_secret: str | None = setting(
        None,
        "Encrypts the reasoning that clients of the Responses API keep themselves; the same at all gateways. Several, "
        "separated by commas: the first one encrypts, all decrypt.",
        secret=True,
    )

    files: str | None = setting(
        None,
        "Store of the files of batches: a directory that all gateways share, or s3://BUCKET/PREFIX (needs "
        "headrace[s3]); without it /v1/files and /v1/batches are not served.",
    )
    max_file_bytes: int = setting(200 << 20, "Larger files get a 413.", minimum=1024, maximum=1 << 30)
    files_tenant_bytes: int = setting(10 << 30, "Bytes of all files of a tenant.", minimum=1 << 20)

    adapters: str | None = setting(
        None,
        "Store of adapters (LoRA), the same for gateways and workers: a directory that all share, or "
        "s3://BUCKET/PREFIX (needs headrace[s3]); without it the operator's port adds none.",
    )

    auth: bool = setting(
        True,
        "Ask clients for a key. Without, all who reach the port are the tenant `default`; allowed on loopback only.",
    )

    cors_origins: str | None = setting(
        None,
        "Origins whose web pages may read answers, separated by commas: https://chat.example.com. `localhost` stands "
        "for every port of this machine.",
    )

    max_body_bytes: int = setting(32 << 20, "Larger request bodies get a 413.", minimum=1024, maximum=1 << 30)
    max_body_bytes_in_flight: int = setting(
        256 << 20, "Bytes of bodies on their way in, per process; a key may hold as many as are free.", minimum=1 << 20
    )
    body_timeout_s: float = setting(
        30.0,
        "Time a client has to send its request body, and a second more for each 64 kB that has arrived.",
        minimum=0.1,
    )
    head_timeout_s: float = setting(15.0, "Time a client has to send a request's head.", minimum=0.1)
    keep_alive_s: float = setting(75.0, "Time a connection may wait for its next request.", minimum=0.1)
    max_connections: int = setting(
        4096,
        "Client connections per process. Idle ones are closed to make room; health is exempt.",
        minimum=1,
    )
    max_connections_per_address: int | None = setting(
        None, "The same for the connections of one client address; none does not limit.", minimum=1
    )
    max_streams: int = setting(2048, "Requests being answered at once per process; one key may hold 7/8.", minimum=1)
    send_timeout_s: float = setting(30.0, "A client that takes no bytes for so long is cut off.", minimum=0.1)
    stream_buffer_bytes: int = setting(
        1 << 20, "Unsent bytes a slow client may pile up before it is cut off.", minimum=4096
    )

    resume_grace_s: float = setting(
        60.0,
        "Time a resumable stream is generated without a client; then it is cancelled.",
        minimum=1,
        maximum=600,
    )
    resume_keep_s: float = setting(
        600.0, "Time an answer that can be resumed or repeated is kept after its end.", minimum=1, maximum=3600
    )
    resume_stream_bytes: int = setting(
        4 << 20, "A resumable stream with a larger log can be read on, and not resumed.", minimum=4096, maximum=32 << 20
    )

    allow_unknown_parameters: bool = setting(
        False, "Ignore parameters that ops/docs/parameters.md does not name, instead of refusing the request."
    )

    image_hosts: str | None = setting(
        None,
        "Hosts from which images are fetched that requests name by an https URL, separated by commas: "
        "images.example.com, *.example.com, or * for every public one. None: images come in the request alone.",
    )
    max_image_bytes: int = setting(20 << 20, "Larger images get a 400.", minimum=1024, maximum=MAX_IMAGE_BYTES)
    max_image_pixels: int = setting(64_000_000, "Images of more pixels get a 400.", minimum=1, maximum=1 << 28)
    max_images: int = setting(
        32, "Requests with more images get a 400; 0: no images are read.", minimum=0, maximum=MAX_IMAGES
    )
    max_request_pixels: int = setting(
        100_000_000, "Requests whose images have more pixels together get a 400.", minimum=1, maximum=1 << 30
    )
    media_tenant_bytes: int = setting(
        256 << 20, "Bytes of a tenant's images that are stored at once, each rounded up to 64 KB.", minimum=1 << 20
    )
    interactive_ttft_slo_s: float = setting(
        10.0, "Requests whose predicted time to first token is longer get a 503.", minimum=0.01
    )
    batch_drain_s: float = setting(
        3600.0,
        "`headrace_fleet_workers_needed` asks for workers that finish the batch backlog within so long.",
        minimum=1,
    )
    default_timeout_s: float = setting(600.0, "Deadline of a request that names no `timeout`.", minimum=0.1)
    max_queued_requests: int = setting(2048, "Waiting requests per model before new ones get a 503.", minimum=1)
    max_queued_tokens: int = setting(8_000_000, "Waiting prompt tokens per model before a 503.", minimum=1)

    cache_ttl_s: float = setting(3600.0, "Lifetime of a cached response, jittered; 0 turns the cache off.", minimum=0)
    cache_max_value_bytes: int = setting(256 << 10, "Larger responses are not cached.", minimum=1024)
    cache_memory_bytes: int = setting(
        8 << 20, "Cached responses of each process's own, in front of those in Redis; 0 keeps none.", minimum=0
    )

    drain_timeout_s: float = setting(30.0, "Time running streams get to finish at shutdown.", minimum=0)
    audit_file: Path | None = setting(None, AUDIT_HELP)
    log_format: str = setting("text", LOG_FORMAT_HELP, choices=FORMATS)
    request_log_per_s: float = setting(DEFAULT_PER_S, REQUEST_LOG_HELP, minimum=0)
    keep_requests: int = setting(
        2000,
        "Requests that have ended whose timelines each process keeps, for 15 minutes at most; 0 keeps none.",
        minimum=0,
        maximum=100_000,
    )
    device_hour_cost: float | None = setting(
        None, "What an hour of one device costs, in any currency: usage and receipts tell prices by it.", minimum=0
    )
    log_prompts: bool = setting(False, "Log the last 500 characters of each prompt, and show them in the console.")
    otlp_endpoint: str | None = setting(None, ENDPOINT_HELP)
    trace_ratio: float = setting(1.0, RATIO_HELP, minimum=0, maximum=1)


SECRET_VARIABLE = "HEADRACE_RESPONSES_SECRET"
MIN_SECRET_CHARACTERS = 32


def read_secrets(setting: str | None) -> list[str]:
    """Return the comma-separated secrets of a setting, none where it is empty; `ConfigError` for a short one."""
    if not setting:
        return []
    secrets = [secret.strip() for secret in setting.split(",")]
    if any(len(secret) < MIN_SECRET_CHARACTERS for secret in secrets):
        raise ConfigError(SECRET_VARIABLE, f"has a secret of fewer than {MIN_SECRET_CHARACTERS} characters")
    return secrets
