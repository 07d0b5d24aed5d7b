"""Why attempts end without an answer, and others are made."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "worker_dead",
    "gap",
    "handoff",
    "prefilled",
    "silent",
    "waiting",
    "unclaimed",
    "nats_restart",
    "cancelled",
    "early",
]

BLAMELESS: tuple[Reason, ...] = ("prefilled", "waiting", "unclaimed", "nats_restart")
"""No worker was at fault: the deadline is the only limit to these."""
