"""The consumers that workers pull from: one of each queue of a model."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NotFoundError

from shared.batch_streams import DEFAULT_TENANT, TENANT_QUEUES, batch_stream
from shared.errors import DependencyError
from shared.streams import INTERACTIVE_STREAM, StreamLimits
from shared.subjects import Queue, encode_name, request_subject


def queue_stream(queue: Queue, tenant: str) -> str:
    """Return the stream in which requests of a queue wait: one for all, or the tenant's batch queue."""
    return batch_stream(tenant) if queue in TENANT_QUEUES else INTERACTIVE_STREAM


def consumer_name(model: str, queue: Queue) -> str:
    """Return the name of the consumer that all workers of a model share for a queue."""
    return f"{encode_name(model)}-{queue}"


def consumer_config(model: str, queue: Queue, limits: StreamLimits, tenant: str) -> ConsumerConfig:
    """Return the durable pull consumer that all workers of a model share for one queue."""
    return ConsumerConfig(
        # With a name the call that makes it has the filter in its subject, which permissions can bind to one model.
        name=consumer_name(model, queue),
        durable_name=consumer_name(model, queue),
        filter_subject=request_subject(model, queue, tenant),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=limits.ack_wait_s,
        max_ack_pending=limits.max_ack_pending,
        max_deliver=-1,
    )


@dataclass(frozen=True, slots=True)
class PullConsumer:
    """A consumer of a queue, and the group that NATS asks of every pull from it."""

    name: str
    group: str


async def ensure_consumer(
    js: JetStreamContext, model: str, queue: Queue, limits: StreamLimits, tenant: str = DEFAULT_TENANT
) -> PullConsumer:
    """Make or update the consumer of one queue of one model; `tenant` is of a batch queue.

    NATS delivers stored text to whatever subject a login names, and so to the one on which a consumer takes pulls. The
    group is random, and only those who may read the consumer's configuration know it: other text is refused as a pull.

    Raises:
        DependencyError: NATS does not let us.
    """
    config = consumer_config(model, queue, limits, tenant)
    stream, name = queue_stream(queue, tenant), consumer_name(model, queue)
    try:
        group = await _group_of(js, stream, name) or secrets.token_urlsafe(12)
        # The client library knows no groups. By this policy they change nothing about whose pull is served.
        settings = config.as_dict() | {"priority_groups": [group], "priority_policy": "overflow"}
        call = json.dumps({"stream_name": stream, "config": settings}).encode()
        await js._api_request(f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{config.filter_subject}", call)
    except (APIError, NatsTimeoutError) as error:
        raise DependencyError(f"NATS consumer {name} could not be created: {error!r}") from error
    return PullConsumer(name, group)


class Deliveries(NamedTuple):
    """How many requests wait in a queue, and how often its consumer has delivered one."""

    num_waiting: int
    num_delivered: int


async def read_deliveries(js: JetStreamContext, model: str, queue: Queue) -> Deliveries | None:
    """Read the state of a queue of interactive requests; None if it has no consumer.

    Raises:
        DependencyError: NATS does not say.
    """
    name = consumer_name(model, queue)
    try:
        found = await js._api_request(f"$JS.API.CONSUMER.INFO.{INTERACTIVE_STREAM}.{name}")
    except NotFoundError:
        return None
    except (APIError, NatsTimeoutError) as error:
        raise DependencyError(f"NATS consumer {name} could not be read: {error!r}") from error
    return Deliveries(found["num_pending"], found["delivered"]["consumer_seq"])


async def _group_of(js: JetStreamContext, stream: str, name: str) -> str | None:
    """Return the group of a consumer; None without one, as earlier versions make it, or if there is no consumer."""
    try:
        found = await js._api_request(f"$JS.API.CONSUMER.INFO.{stream}.{name}")
    except NotFoundError:
        return None
    groups = found["config"].get("priority_groups")
    return groups[0] if groups else None
