"""The hosts of models: what they serve, and which models they cannot start."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from ops.doctor.finding import Finding, warning
from shared.hosted_models import HOST_BEAT_INTERVAL_S, HostBeat, HostedModel
from shared.messages import UNDECODABLE
from shared.subjects import ALL_HOSTS

LISTEN_S = 2 * HOST_BEAT_INTERVAL_S + 0.2


async def host_findings(client: Client) -> list[Finding]:
    """Listen to the hosts; there may be none, or none that has a model."""
    heard: dict[str, HostBeat] = {}

    async def note(message: Msg) -> None:
        with contextlib.suppress(*UNDECODABLE):
            beat = msgspec.msgpack.decode(message.data, type=HostBeat)
            heard[beat.host] = beat

    with contextlib.suppress(NatsError):
        subscription = await client.subscribe(ALL_HOSTS, cb=note)
        await asyncio.sleep(LISTEN_S)
        await subscription.unsubscribe()
    return [_finding(beat) for beat in heard.values() if beat.models]


def _finding(beat: HostBeat) -> Finding:
    counts = Counter(model.state for model in beat.models)
    text = f"{beat.host}: " + ", ".join(f"{count} {state}" for state, count in counts.items())
    for model in beat.models:
        if model.num_withheld:
            text += f"; {model.name}: {model.num_withheld} of {model.num_ready} workers cordoned"
    wrong = [model for model in beat.models if model.state == "failed" or _waits_for_room(model)]
    if not wrong:
        return Finding("models", text)
    text += "".join(f"; {model.name}: {model.error or 'no room'}" for model in wrong)
    name = min(model.name for model in wrong)
    remedy = f"mend that, then `headrace model wake {name}`; or `headrace model unload {name}`"
    if all(map(_waits_for_room, wrong)):
        remedy = "unload a model, or raise HEADRACE_HOST_MEMORY_BYTES"
    return warning("models", text, remedy)


def _waits_for_room(model: HostedModel) -> bool:
    """Whether it has none although it is to run always; one that is loaded on demand takes turns."""
    return model.state == "no_room" and not model.on_demand
