"""Cost and times of one attempt at a request on its worker: sent once, with the attempt's last delta.

It is optional in every message: earlier workers send none, and earlier gateways ignore it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.bounds import NumTokens, Seconds

MAX_PARTS = 64
"""Of each list. A worker sends fewer."""
MAX_DEVICES = 1024


class Timing(Struct, frozen=True, array_like=True):
    """The time of a sequence, by the clock of the worker that finished it: to the first output, and to the end."""

    prefill_s: Seconds
    decode_s: Seconds


class PrefillPart(Struct, frozen=True, array_like=True, gc=False):
    """Tokens that one step computed of a prompt; `at_s` since the request came, `took_s` until the step landed."""

    at_s: Seconds
    took_s: Seconds
    tokens: NumTokens


class Receipt(Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """One attempt. Times are seconds since the worker took the request, by its own clock.

    Shares of the device are in seconds of all devices of the worker: a step of 10 ms on four ranks is 40 ms.

    Attributes:
        taken: Unix seconds at which the worker took it.
        queued_s: Time since the request was sent until then, by the clocks of both ends.
        waited_s: Part of that spent in the worker, waiting for the holder of its prefix.
        admitted_s: Until it was ready for the engine; None if it never was.
        scheduled_s: Until its first step; None without one.
        first_s: Until its first output; None without one.
        ended_s: Until its end.
        num_devices: Of the worker.
        device_s: Its share of all steps; the next three are parts of it.
        prefill_s: Steps that computed its prompt.
        rejected_s: Drafts that were not accepted.
        recomputed_s: Tokens that were computed again after a preemption.
        energy_j: Joules in `device_s`, by the devices' mean power meanwhile; None if they do not report power.
        prompt_tokens, cached_tokens, output_tokens: As of `Usage`, for attempts that have none.
        drafted_tokens, accepted_tokens: Of speculative decoding.
        prefills: In order; those beyond the bound are added to the last one.
        preempted_s: The first preemptions.
    """

    taken: Annotated[float, Meta(ge=0.0, le=1e12)]
    queued_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    admitted_s: Seconds | None = None
    scheduled_s: Seconds | None = None
    first_s: Seconds | None = None
    ended_s: Seconds = 0.0
    num_devices: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] = 1
    device_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    rejected_s: Seconds = 0.0
    recomputed_s: Seconds = 0.0
    energy_j: Seconds | None = None
    prompt_tokens: NumTokens = 0
    cached_tokens: NumTokens = 0
    output_tokens: NumTokens = 0
    drafted_tokens: NumTokens = 0
    accepted_tokens: NumTokens = 0
    prefills: Annotated[tuple[PrefillPart, ...], Meta(max_length=MAX_PARTS)] = ()
    preempted_s: Annotated[tuple[Seconds, ...], Meta(max_length=MAX_PARTS)] = ()
