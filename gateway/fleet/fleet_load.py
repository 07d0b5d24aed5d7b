"""A snapshot of one model's fleet, made from heartbeats, for the shedder and the health routes.

Requests that workers report as waiting count up to what gateways know to wait there: requests that are claimed and have
produced nothing yet. An invented queue would close the model to all clients. Preempted sequences count as running; the
free blocks show them. Batch jobs do not count: they give way to interactive requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from shared.hosted_models import HostedModel
from shared.messages import GatewayHeartbeat, Heartbeat
from shared.pooling import Task
from shared.sampling import SamplingDefaults


class FleetLoad(Struct, frozen=True):
    """Sums over the live, non-draining workers of one model, and over all gateways' unclaimed requests.

    A struct of msgspec for the reason that `Generation` is one: each request changes a few of its many fields.

    Attributes:
        queued_requests: Sequences that wait in workers, plus those published and not yet claimed (by any gateway).
        queued_tokens: Prompt tokens of `queued_requests`.
        prefill_rate: Prompt tokens per second of the whole fleet, as measured; 0 while unknown.
        decode_rate: Generated tokens per second of the whole fleet, as measured; 0 while unknown.
        revisions: Fingerprints of the models the workers serve; more than one while an update rolls out.
        free_slots: Sequences that could start now (`max_num_seqs - running`).
        longest_model_len: The longest context of any of the workers, in tokens; 0 while there is none.
        max_prompt_characters: A longer prompt fits no worker's context; 0 while a worker has not said.
        tasks: Tasks that at least one of the workers supports.
        features: Protocol features that all of the workers support.
        some_features: Those that at least one of them supports.
        num_gateways: Gateways that are alive, this one included: they all fill the same queue.
        chat_format: How the model writes reasoning and tool calls, by most of its workers, or the last that was
            heard while it has none; "" while unknown.
        sampling_defaults: Defaults in the model's files for requests without the parameter, chosen as `chat_format` is.
        fingerprint: Identifies the model's files in answers; None if no worker has reported it.
        coming: How a host is about to serve the model, while no worker does.
        spec_decode_num_drafts: Times that sequences verified drafts, since these workers started.
        spec_decode_num_draft_tokens: Draft tokens verified.
        spec_decode_num_accepted_tokens: Those of them that were accepted.
    """

    model: str
    num_workers: int
    running: int
    queued_requests: int
    queued_tokens: int
    prefill_rate: float
    decode_rate: float
    free_blocks: int
    total_blocks: int
    block_size: int
    max_model_len: int
    free_slots: int
    revisions: tuple[str, ...] = ()
    num_gateways: int = 1
    max_prompt_characters: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    longest_model_len: int = 0
    tasks: frozenset[Task] = frozenset({"generate"})
    features: frozenset[str] = frozenset()
    some_features: frozenset[str] = frozenset()
    chat_format: str = ""
    sampling_defaults: SamplingDefaults | None = None
    fingerprint: str | None = None
    coming: HostedModel | None = None

    @property
    def num_slots(self) -> int:
        """Sequences that the fleet can run at once."""
        return self.running + self.free_slots

    def share(self, num_tenants: int, num_requests: int, num_tokens: int) -> FleetLoad:
        """Return the load as one of `num_tenants` meets it while it keeps within its share of slots and blocks.

        Nothing waits before it there, because workers let others give way (`Admission`). It has `num_requests`, whose
        prompts have `num_tokens`.
        """
        return replace(
            self,
            running=num_requests,
            queued_requests=0,
            queued_tokens=0,
            free_slots=self.num_slots // num_tenants - num_requests,
            free_blocks=self.total_blocks // num_tenants - num_tokens // self.block_size,
            total_blocks=self.total_blocks // num_tenants,
        )

    def prompt_tokens(self, estimate: float) -> float:
        """Return an estimate of one prompt's tokens, capped at the longest context: a longer prompt is refused."""
        return min(estimate, self.longest_model_len) if self.longest_model_len else estimate


def fingerprint_of(revisions: tuple[str, ...]) -> str | None:
    """Return the fingerprint of the model files of the workers; None if no worker has reported it."""
    if not any(revisions):
        return None
    return "fp_" + hashlib.sha256("\n".join(revisions).encode()).hexdigest()[:12]


def coming_load(load: FleetLoad, coming: HostedModel) -> FleetLoad:
    """Return the load of a model without workers that a host can load, with its last worker's capabilities."""
    last = coming.last
    if last is None:
        return replace(load, coming=coming)
    revisions = (last.revision,)
    return replace(
        load,
        coming=coming,
        max_model_len=last.max_model_len,
        longest_model_len=last.max_model_len,
        max_prompt_characters=last.max_prompt_characters,
        revisions=revisions,
        fingerprint=fingerprint_of(revisions),
        tasks=frozenset(last.tasks),
        features=frozenset(last.features),
        some_features=frozenset(last.features),
    )


# Estimates take a token for 3.5 bytes; it has one at least. A chat template adds tokens to each prompt.
_TOKENS_PER_ESTIMATE = 3.5
_TEMPLATE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """State of this gateway's own requests.

    Attributes:
        unshown: Of a model: requests that no heartbeat shows, and their prompt tokens.
        awaited: By model: requests that are claimed and have produced nothing yet, and their prompt tokens.
    """

    unshown: Callable[[str], tuple[int, int]]
    awaited: Callable[[], dict[str, tuple[int, int]]]


def credible_waiting(
    model: str,
    workers: Sequence[Heartbeat],
    gateways: Sequence[GatewayHeartbeat],
    awaited: dict[str, tuple[int, int]],
) -> tuple[int, int]:
    """Return how many requests wait in the workers of a model, and their prompt tokens, as far as reports are credible.

    Another gateway's heartbeat may be a second old. Requests are spread over gateways, so each is taken to wait for at
    least as many as this one. Beside a gateway of an older version, which does not report it, nothing is bounded.
    """
    of_batches = (0 if worker.metrics is None else worker.metrics.waiting_batch for worker in workers)
    requests = sum(max(0, worker.waiting - num) for worker, num in zip(workers, of_batches, strict=True))
    tokens = sum(worker.waiting_tokens for worker in workers)
    own = awaited.get(model, (0, 0))
    most_requests, most_tokens = own
    for gateway in gateways:
        if gateway.awaited is None:
            return requests, tokens
        num_requests, num_tokens = gateway.awaited.get(model, (0, 0))
        most_requests += max(num_requests, own[0])
        most_tokens += max(num_tokens, own[1])
    most_tokens = int(most_tokens * _TOKENS_PER_ESTIMATE) + most_requests * _TEMPLATE_TOKENS
    return min(requests, most_requests), min(tokens, most_tokens)


def unclaimed_of(gateway: GatewayHeartbeat, model: str) -> tuple[int, int]:
    """Return requests and tokens waiting at another gateway for a model; older versions report all models together."""
    if gateway.unclaimed_of is None:
        return gateway.unclaimed, gateway.unclaimed_tokens
    return gateway.unclaimed_of.get(model, (0, 0))
