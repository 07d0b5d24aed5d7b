"""Models on hosts, on the wire: what each host reports of its models, and an operator's orders about them.

A host starts and stops the workers of its models (`ops.stack.hosting`). Gateways learn from its messages which models
exist although no worker serves them at the moment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import Counter, NumRequests, PeerName, Seconds, Version
from shared.messages import PROTOCOL_VERSION, Heartbeat

HOST_BEAT_INTERVAL_S = 0.5
MAX_HOSTED_MODELS = 256

HostedState = Literal["asleep", "loading", "awake", "stopping", "no_room", "failed"]
"""`no_room`: it is to be loaded, and nothing can give way to it yet."""
Action = Literal["load", "replace", "unload", "sleep", "wake"]
PathText = Annotated[str, Meta(min_length=1, max_length=4096)]
Sentence = Annotated[str, Meta(max_length=1000)]


class HostedModel(Struct, frozen=True, kw_only=True):
    """A model of a host.

    Attributes:
        num_ready: Its workers that serve what it is now; not those that it replaces.
        num_withheld: Those of them that take no requests: they are cordoned, or were withdrawn for wrong answers.
        ready_in_s: Predicted time until a worker serves a request that comes now; 0 while one does.
        need_bytes: Memory of one worker.
        error: Why it failed to start the last time; None when it did not.
        replace_error: Why its last replacement was undone; None when it was not, and from the next replacement on.
        load_s: How long its last start took; None before the first.
        wakes: How often requests, or an operator, have had it loaded from sleep since the host began.
        last: The last heartbeat of one of its workers, without metrics: how answers are to be read while none runs.
    """

    name: PeerName
    path: PathText
    state: HostedState
    on_demand: bool
    num_ready: NumRequests = 0
    num_withheld: NumRequests = 0
    ready_in_s: Seconds = 0.0
    need_bytes: Counter = 0
    error: Sentence | None = None
    replace_error: Sentence | None = None
    load_s: Seconds | None = None
    wakes: Counter = 0
    last: Heartbeat | None = None


class HostBeat(Struct, frozen=True, kw_only=True, tag="host"):
    """A host's state, twice a second and after each change; `memory_bytes` is what its models may use, if bounded."""

    host: PeerName
    models: Annotated[tuple[HostedModel, ...], Meta(max_length=MAX_HOSTED_MODELS)] = ()
    used_bytes: Counter = 0
    memory_bytes: Counter | None = None
    version: Version = PROTOCOL_VERSION


class ModelOrder(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="model_order"):
    """Change the models of a host. With `replace`, omitted fields keep their values.

    Attributes:
        path: With `load` and `replace`: directory or GGUF file under the directories that the host's owner allows.
        workers: Worker processes, each of which loads the model; 1 with `load`.
        on_demand: It is loaded when requests wait for it, and sleeps after `idle_s` seconds without any,
            300 with `load`.
        memory_bytes: Memory of one worker; estimated from the files and the KV cache if not given.
        options: Settings of the worker by their names, such as `max_num_seqs`; with `replace`, beside those it has.
    """

    action: Action
    name: PeerName
    path: PathText | None = None
    workers: Annotated[int, Meta(ge=1, le=64)] | None = None
    on_demand: bool | None = None
    idle_s: Annotated[float, Meta(ge=1, le=86400 * 7)] | None = None
    memory_bytes: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    options: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=256)]], Meta(max_length=64)
    ] = {}


class ModelReply(Struct, frozen=True, tag="model_reply"):
    """What became of an order; `error` is None when it is carried out."""

    error: Sentence | None = None
