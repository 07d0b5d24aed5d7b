"""What wakes a model: messages that wait in its queues, whoever has published them."""

from __future__ import annotations

import nats

from ops.stack.hosting.model_state import Demand, Waiting
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import encode_name, request_subject


async def test_job_that_was_published_past_the_gateways_counts_for_its_model_alone(nats_url: str) -> None:
    publisher = await nats.connect(nats_url)
    host: DirectClient = await connect(nats_url, role="worker", name="host")
    try:
        js = publisher.jetstream()
        await ensure_streams(js, StreamLimits(), ["default", "woken-by"])
        sleeping, other = "org/sleeping by demand", "other by demand"
        subject = f"hr.req.{encode_name(sleeping)}"
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(), other: Waiting()}
        await js.publish(f"{subject}.batch.woken-by", b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(1, 1), other: Waiting()}
        await js.publish(f"{subject}.interactive", b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(2, 1), other: Waiting()}
        await js.publish(request_subject(sleeping, "ready", ""), b"{}")
        assert await Demand(host).count([sleeping, other]) == {sleeping: Waiting(3, 1), other: Waiting()}
    finally:
        await publisher.close()
        await host.close()
