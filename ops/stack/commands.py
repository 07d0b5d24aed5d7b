"""The commands of the system's parts. `headrace up` and compose.yaml run the very same ones."""

from __future__ import annotations

from pathlib import Path

NATS = ("nats-server", "-c")
REDIS = ("redis-server",)

_OPS = Path(__file__).parents[1]
NATS_CONFIG = _OPS / "nats" / "headrace.conf"
REDIS_CONFIG = _OPS / "redis" / "headrace.conf"

NATS_ROLES = ("gateway", "worker", "batch", "admin")


def nats_password_variable(role: str) -> str:
    """Return the name of the environment variable from which NATS takes a role's password."""
    return f"HEADRACE_NATS_{role.upper()}_PASSWORD"
