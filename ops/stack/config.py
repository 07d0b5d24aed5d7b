"""The settings of `headrace up`, those of a host of models among them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from shared.config import setting
from shared.nats_files import NatsFiles

DEFAULT_STATE_DIR = Path(".headrace")
AUDIT_FILE_NAME = "audit.jsonl"
# Settings of the parts that `headrace up` chooses itself: it runs on loopback, and `gateways` says how many; it watches
# its workers itself, and several could not share one port. All it starts is on one host.
CHOSEN_SETTINGS = frozenset(
    {
        *("host", "processes", "operator_host", "health_host", "health_port", "probe_key"),
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file"),
        *("nnodes", "node_rank", "master_addr", "master_port", "group_token"),
    }
)
DEMO_MODEL = Path(__file__).parents[1] / "demo_model" / "model"


@dataclass(frozen=True, slots=True)
class HostSettings(NatsFiles):
    """What operators may load here, and how much of it."""

    host_name: str = setting(socket.gethostname, "Name of this host of models, unique among all.")
    models_dir: str | None = setting(
        None,
        "Directories, separated by commas, under which operators may load models while the system runs, with `headrace "
        "model load`; without one they cannot.",
    )
    host_memory_bytes: int | None = setting(
        None,
        "Memory that all models which operators load may use in all: weights and KV caches. A model that sleeps when "
        "idle gives way to another that does not fit beside it. No bound if not given.",
        minimum=1,
    )
    min_awake_s: float = setting(
        30.0,
        "A model that was loaded on demand serves at least this long before it gives way: at once when it is idle, and "
        "else to a model whose requests have waited as long; batch jobs end nothing that serves people.",
        minimum=0,
        maximum=3600,
    )


@dataclass(frozen=True, slots=True)
class UpConfig(HostSettings):
    """What to start, and where. Every other setting of gateways and workers comes to them through variables."""

    port: int = setting(8000, "Port of the HTTP API on loopback; 0 takes a free one.", minimum=0, maximum=65535)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "Directory for logs, the batch queue and the API key.")
    model: Path | None = setting(
        None,
        "Model to serve: a directory in Hugging Face's format, its id at the hub, or a GGUF file; the demo "
        "model if not given. The option may be given again, for workers of a further model.",
    )
    workers: int = setting(1, "Worker processes for each model; each loads it.", minimum=1, maximum=64)
    roles: str | None = setting(
        None,
        "Roles of the workers of each model in turns, separated by commas (prefill,decode,decode): a worker computes "
        "prompts, or goes on behind the first token, or does both. Off if not given.",
    )
    gateways: int = setting(1, "Gateway processes that share the port.", minimum=1, maximum=64)
    simulate: float | None = setting(
        None,
        "Simulate the engine: one token per sequence and step of this many milliseconds. Only the tokenizer is used.",
        minimum=0,
        maximum=60_000,
    )
    api_key: str | None = setting(
        None, "API key to accept; made and kept in the state directory if not given.", secret=True
    )
    drain_timeout_s: float | None = setting(
        None, "Seconds that running streams get to finish at shutdown; 6 if not given.", minimum=0, maximum=3600
    )
    hang_timeout_s: float = setting(
        10.0, "Seconds without a sign of life after which a part is killed and started anew.", minimum=2, maximum=3600
    )
    ready_file: Path | None = setting(None, "Write a JSON description of the running system here once it is ready.")
    nats_url: str | None = setting(None, "Use this NATS server instead of starting one.")
    nats_user: str | None = setting(None, "User at that NATS server.")
    nats_password: str | None = setting(None, "Password at that NATS server.", secret=True)
    redis_url: str | None = setting(None, "Use this Redis server instead of starting one.", secret=True)
