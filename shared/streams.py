"""The JetStream streams except the batch queues.

The first process that may makes the streams: `ensure_streams` is idempotent. Every stream is bounded. A
stream that is missing and that we may not or cannot make is a `DependencyError`.
The queues refuse new messages when full (`discard=new`), so that a full queue is an honest error at the publisher;
results, their ends, dead letters, responses and records of progress make room by dropping the oldest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RePublish, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from shared.batch_streams import MAX_WAIT_KEY, TENANT_QUEUES, batch_stream, ensure_batch_stream, jetstream_problem
from shared.errors import DependencyError
from shared.nats_connection import is_clustered
from shared.subjects import ADAPTER_NAMES, ALIAS_CHANGED, ALIASES, canary_subject, dead_letter_filter, encode_name

INTERACTIVE_STREAM = "HR_INTERACTIVE"
RESULTS_STREAM = "HR_RESULTS"
DEAD_STREAM = "HR_DEAD"
PROGRESS_STREAM = "HR_PROGRESS"
RESPONSES_STREAM = "HR_RESPONSES"
BATCHES_STREAM = "HR_BATCHES"
USAGE_STREAM = "HR_USAGE"
HOURS_STREAM = "HR_HOURS"
ENDS_STREAM = "HR_ENDS"
MEDIA_STREAM = "HR_MEDIA"
ADAPTERS_STREAM = "HR_ADAPTERS"
STREAMS_STREAM = "HR_STREAMS"
ALIASES_STREAM = "HR_ALIASES"

# A counter with its headers.
_USAGE_MESSAGE_BYTES = 1 << 10
_STREAM_EXISTS = 10058


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of streams: messages, bytes, seconds; `replicas` None is one, and leaves existing streams as they are."""

    replicas: int | None = None
    interactive_max_msgs: int = 10_000
    interactive_max_bytes: int = 256 << 20
    interactive_max_age_s: float = 600.0
    tenant_max_bytes: int = 256 << 20
    tenant_max_msgs: int = 100_000
    tenant_max_wait_s: float = 7 * 86400.0
    tenant_duplicate_window_s: float = 120.0
    results_max_bytes: int = 1 << 30
    results_max_age_s: float = 7 * 86400.0
    ends_max_bytes: int = 128 << 20
    ends_max_age_s: float = 30 * 86400.0
    dead_max_bytes: int = 256 << 20
    dead_max_age_s: float = 30 * 86400.0
    dead_max_msgs_per_subject: int = 500
    progress_max_bytes: int = 64 << 20
    progress_max_age_s: float = 86400.0
    responses_max_bytes: int = 1 << 30
    usage_max_bytes: int = 64 << 20
    hours_max_age_s: float = 8 * 86400.0
    responses_max_age_s: float = 7 * 86400.0
    batches_max_bytes: int = 128 << 20
    batches_max_age_s: float = 30 * 86400.0
    streams_max_bytes: int = 128 << 20
    streams_max_age_s: float = 7200.0
    media_max_bytes: int = 512 << 20
    aliases_max_bytes: int = 64 << 20
    adapters_max_bytes: int = 16 << 20
    ack_wait_s: float = 10.0
    max_ack_pending: int = 10_000
    batch_max_deliver: int = 5


def stream_configs(limits: StreamLimits) -> list[StreamConfig]:
    """Return the configurations of all streams but the batch queues."""
    return _replicated([_interactive_config(limits), *_record_configs(limits), *_gateway_configs(limits)], limits)


def tenant_stream_config(tenant: str, limits: StreamLimits) -> StreamConfig:
    """Return the configuration of the batch queue of one tenant."""
    return StreamConfig(
        name=batch_stream(tenant),
        subjects=[f"hr.req.*.{queue}.{encode_name(tenant)}" for queue in TENANT_QUEUES],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_bytes=limits.tenant_max_bytes,
        max_msgs=limits.tenant_max_msgs,
        duplicate_window=limits.tenant_duplicate_window_s,
        metadata={MAX_WAIT_KEY: f"{limits.tenant_max_wait_s:g}"},
        num_replicas=limits.replicas or 1,
    )


def _replicated(configs: list[StreamConfig], limits: StreamLimits) -> list[StreamConfig]:
    return [config.evolve(num_replicas=limits.replicas or 1) for config in configs]


def _interactive_config(limits: StreamLimits) -> StreamConfig:
    return StreamConfig(
        name=INTERACTIVE_STREAM,
        subjects=["hr.req.*.interactive", "hr.req.*.resumed"],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.NEW,
        max_msgs=limits.interactive_max_msgs,
        max_bytes=limits.interactive_max_bytes,
        max_age=limits.interactive_max_age_s,
        duplicate_window=10.0,
    )


def _record_configs(limits: StreamLimits) -> list[StreamConfig]:
    return [
        _record_config(
            RESULTS_STREAM,
            ["hr.result.*.*"],
            max_bytes=limits.results_max_bytes,
            max_age=limits.results_max_age_s,
            # A batch publisher may ask for the result of one subject, and hears of each result once, when it is stored.
            allow_direct=True,
            republish=RePublish(src="hr.result.*.*", dest="hr.stored.{{wildcard(1)}}.{{wildcard(2)}}"),
        ),
        # How jobs ended, and what each tenant stores (`shared.result_shares`).
        _record_config(
            ENDS_STREAM, ["hr.end.*.*", "hr.kept.*"], max_bytes=limits.ends_max_bytes, max_age=limits.ends_max_age_s
        ),
        _record_config(
            DEAD_STREAM,
            [dead_letter_filter()],
            max_bytes=limits.dead_max_bytes,
            max_age=limits.dead_max_age_s,
            # With the size of a letter (`shared.dead_letters`) it bounds a tenant's bytes, for each model and lane.
            max_msgs_per_subject=limits.dead_max_msgs_per_subject,
            duplicate_window=120.0,
        ),
        _record_config(
            PROGRESS_STREAM, ["hr.progress.*.*"], max_bytes=limits.progress_max_bytes, max_age=limits.progress_max_age_s
        ),
        *_account_configs(limits),
    ]


def _account_configs(limits: StreamLimits) -> list[StreamConfig]:
    usage_bytes, hours_age_s = limits.usage_max_bytes, limits.hours_max_age_s
    return [
        # Each message is a change, which NATS adds to the total of its subject.
        _counters_config(USAGE_STREAM, "hr.usage.*.*.*.*", max_bytes=usage_bytes),
        _counters_config(HOURS_STREAM, "hr.hours.*.*.*.*", max_bytes=usage_bytes, max_age=hours_age_s),
        # The gateways, which write it, bound what each tenant keeps (`gateway.responses.log`).
        _record_config(
            RESPONSES_STREAM,
            ["hr.response.*.*.*"],
            max_bytes=limits.responses_max_bytes,
            max_age=limits.responses_max_age_s,
        ),
        # Records of batches, which the gateways write; what they say of those that run is replaced every few seconds.
        _record_config(
            BATCHES_STREAM, ["hr.batch.*.*.*"], max_bytes=limits.batches_max_bytes, max_age=limits.batches_max_age_s
        ),
        # Images of requests, each of which expires by itself. A full store refuses: what waits needs its images.
        _record_config(
            MEDIA_STREAM, ["hr.media.*.*.*"], max_bytes=limits.media_max_bytes, max_age=2 * 86400.0, allow_msg_ttl=True
        ).evolve(discard=DiscardPolicy.NEW),
        # What names of adapters mean. A full stream refuses: no name may be forgotten.
        _record_config(ADAPTERS_STREAM, [ADAPTER_NAMES], max_bytes=limits.adapters_max_bytes).evolve(
            discard=DiscardPolicy.NEW
        ),
    ]


def _gateway_configs(limits: StreamLimits) -> list[StreamConfig]:
    """Return the streams that gateways alone write and read, and may make themselves."""
    return [
        # The log of resumable streams is in memory: each token waits for it.
        _record_config(
            STREAMS_STREAM,
            ["hr.stream.>", "hr.fence.*"],
            max_bytes=limits.streams_max_bytes,
            max_age=limits.streams_max_age_s,
        ).evolve(storage=StorageType.MEMORY),
        # The table of aliases, and what gateways count of canaries, which expires by itself.
        _record_config(
            ALIASES_STREAM,
            [ALIASES, canary_subject("*", "*")],
            max_bytes=limits.aliases_max_bytes,
            allow_msg_ttl=True,
            republish=RePublish(src=ALIASES, dest=ALIAS_CHANGED),
        ),
    ]


def _counters_config(name: str, subjects: str, **limits: Any) -> StreamConfig:
    """Return the configuration of counters.

    NATS lets no stream of counters refuse new messages when it is full: few large ones must not fill it.
    """
    counters: dict[str, Any] = {"allow_msg_counter": True, "allow_atomic": True, "duplicate_window": 600.0}
    return _record_config(name, [subjects], max_msg_size=_USAGE_MESSAGE_BYTES, **counters, **limits)


def _record_config(name: str, subjects: list[str], *, max_msgs_per_subject: int = 1, **limits: Any) -> StreamConfig:
    """Return the configuration of a stream that survives restarts and drops its oldest messages to make room."""
    return StreamConfig(
        name=name,
        subjects=subjects,
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=max_msgs_per_subject,
        **limits,
    )


async def ensure_streams(js: JetStreamContext, limits: StreamLimits, tenants: Iterable[str] = ()) -> None:
    """Make the streams that are missing; leave existing ones as their operator configured them.

    The batch queues of `tenants` are made too.
    """
    for config in stream_configs(limits):
        await _find_or_make(js, config)
    for tenant in tenants:
        await ensure_batch_stream(js, tenant_stream_config(tenant, limits))


async def ensure_record_streams(js: JetStreamContext, limits: StreamLimits) -> None:
    """Make the streams of results, ends, dead letters, progress, responses, batches, images and names that are missing.

    The queue of interactive requests is not among them: who makes it anew has to publish again what the old one held.
    """
    for config in _replicated(_record_configs(limits), limits):
        await _find_or_make(js, config)


async def ensure_interactive_stream(js: JetStreamContext, limits: StreamLimits) -> None:
    """Make the queue of interactive requests if it is missing.

    It lives in memory and is all that an answer needs, so gateways and workers may make it themselves.

    Raises:
        DependencyError: It is missing and we may not or cannot make it, or an older version has made it.
    """
    config = _interactive_config(limits)
    found = await _find_or_make(js, config)
    missing = set(config.subjects or ()) - set(found.subjects or ())
    if missing:
        # Messages published there would be lost.
        raise DependencyError(
            f"NATS stream {config.name} is of an older version, without {', '.join(sorted(missing))}: run `headrace "
            "setup` once, with the admin user."
        )


async def ensure_stream(js: JetStreamContext, name: str, limits: StreamLimits) -> None:
    """Make a stream if it is missing, of those that gateways may make themselves."""
    for config in stream_configs(limits):
        if config.name == name:
            await _find_or_make(js, config)


async def reshape_streams(js: JetStreamContext, limits: StreamLimits, tenants: Iterable[str] = ()) -> None:
    """Bring existing streams to this version's subjects and features, and to the replicas that are asked for.

    Their limits stay as their operator set them.

    Raises:
        DependencyError: We may not, or there are fewer servers than replicas.
    """
    for config in [*stream_configs(limits), *(tenant_stream_config(tenant, limits) for tenant in tenants)]:
        assert config.name is not None
        try:
            found = (await js.stream_info(config.name)).config
            wanted = found.evolve(
                subjects=config.subjects,
                allow_direct=config.allow_direct or found.allow_direct,
                republish=config.republish,
                max_msg_size=found.max_msg_size if config.max_msg_size is None else config.max_msg_size,
                allow_atomic=config.allow_atomic or found.allow_atomic,
                allow_msg_ttl=config.allow_msg_ttl or found.allow_msg_ttl,
                # That of a tenant is a limit, which its operator set.
                duplicate_window=(found if config.name.startswith("HR_BATCH_") else config).duplicate_window,
                num_replicas=limits.replicas or found.num_replicas,
            )
            if wanted != found:
                await js.update_stream(wanted)
        except (APIError, NatsTimeoutError) as error:
            raise DependencyError(f"NATS stream {config.name} could not be brought up to date: {error!r}") from error


async def _find_or_make(js: JetStreamContext, config: StreamConfig) -> StreamConfig:
    """Return how a stream is configured, which is made if it is missing."""
    assert config.name is not None
    try:
        return (await js.stream_info(config.name)).config
    except NotFoundError:
        await _make_stream(js, config)
        return config
    except (NatsTimeoutError, ServiceUnavailableError) as error:
        raise DependencyError(jetstream_problem(js)) from error


async def _make_stream(js: JetStreamContext, config: StreamConfig) -> None:
    """Make a stream. One in memory, which NATS loses when it restarts, never repeats its predecessors' numbers.

    Gateways delete messages by number. A number of a stream that is lost must find nothing in the stream that replaces
    it, not the message of somebody else. So numbers begin at the time in microseconds.
    """
    if config.storage is StorageType.MEMORY:
        config = config.evolve(first_seq=time.time_ns() // 1000)
    try:
        await js.add_stream(config)
    except (APIError, NatsTimeoutError) as error:
        if isinstance(error, APIError) and error.err_code == _STREAM_EXISTS:
            return  # somebody else has just made it, with another first number
        if not isinstance(error, NatsTimeoutError):
            told = f"is missing and could not be created ({error}). Create it with a user that may: `headrace setup`"
            problem = f"NATS stream {config.name} {told}, or start NATS with JetStream and more storage."
        elif is_clustered(js._nc):
            problem = jetstream_problem(js)
        else:
            # NATS answers no call that a login may not make.
            problem = (
                "could not be created: NATS did not answer. If this login may not create it, run `headrace setup` "
                "once, with the admin user; if NATS is slow, its log says `took too long`."
            )
            problem = f"NATS stream {config.name} {problem}"
        raise DependencyError(problem) from error
