"""The settings of a host of models, those of `headrace up` among them."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from shared.config import setting
from shared.nats_files import NatsFiles


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
