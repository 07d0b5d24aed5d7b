"""The streams that gateways alone write and read, and may make themselves."""

from __future__ import annotations

from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig

from shared.subjects import ALIAS_CHANGED, ALIASES, canary_subject

STREAMS_STREAM = "HR_STREAMS"
ALIASES_STREAM = "HR_ALIASES"


def streams_config(max_bytes: int, max_age_s: float) -> StreamConfig:
    """Return the log of resumable streams. It is in memory: each token waits for it."""
    return StreamConfig(
        name=STREAMS_STREAM,
        subjects=["hr.stream.>", "hr.fence.*"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_bytes=max_bytes,
        max_age=max_age_s,
    )


def aliases_config(max_bytes: int) -> StreamConfig:
    """Return the table of aliases, and what gateways count of canaries, which expires by itself."""
    return StreamConfig(
        name=ALIASES_STREAM,
        subjects=[ALIASES, canary_subject("*", "*")],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_bytes=max_bytes,
        allow_msg_ttl=True,
        republish=RePublish(src=ALIASES, dest=ALIAS_CHANGED),
    )
