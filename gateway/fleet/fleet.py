"""The workers and the other gateways, as their heartbeats show them: queue lengths and drain rates.

Owns the view of gateways and the sums over workers; nothing else writes them. `liveness` knows the live workers.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import msgspec

from gateway.fleet.adapter_names import FoundAdapter, NamedAdapters, WorkersNames, find_adapter
from gateway.fleet.deaths import Death
from gateway.fleet.fleet_load import FleetLoad, OwnRequests, coming_load, credible_waiting, fingerprint_of, unclaimed_of
from gateway.fleet.hosted_models import HostedModels
from gateway.fleet.last_services import LastServices
from gateway.fleet.liveness import FleetLimits, Liveness
from gateway.fleet.queue_takers import pulled_between, sees_empty_queue, takes
from shared.adapter_calls import NamesRead
from shared.hosted_models import HostBeat, HostedModel
from shared.messages import GatewayHeartbeat, Heartbeat
from shared.sampling import SamplingDefaults
from shared.subjects import Queue

_T = TypeVar("_T", bound=Hashable)

# Silence in seconds after which another gateway's queue no longer counts.
GATEWAY_SILENCE_S = 5.0
# A model without workers for longer is unknown again: it was taken out of service, not interrupted.
MODEL_MEMORY_S = 300.0
# How often that is checked.
REVIEW_INTERVAL_S = 1.0
# Most workers, and most models, that are tracked: NATS takes no more connections. A worker that lies about its name
# cannot make a gateway track more.
MAX_WORKERS = 4096
# The same for other gateways.
MAX_GATEWAYS = 1024


class Fleet:
    """All live workers and gateways."""

    def __init__(
        self,
        gateway: str,
        limits: FleetLimits,
        own: OwnRequests,
        on_dead: Callable[[Death], None] = lambda death: None,
        on_reconnected: Callable[[str], None] = lambda worker: None,
    ) -> None:
        """Start empty. `own` is the load of this gateway's requests; for the other arguments see `Liveness`."""
        self._gateway = gateway
        self._own = own
        # When each model last had a worker.
        self._known_models: dict[str, float] = {}
        # Those of the workers that each model had last: while all are away, requests are read as they will be answered.
        self._traits: dict[str, _AnswerTraits] = {}
        # Models of whose workers something was heard that changes that.
        self._changed_models: set[str] = set()
        self._models_reviewed_at = -math.inf
        # Sums of the heartbeats, until the next one changes them.
        self._loads: dict[str, FleetLoad] = {}
        self._gateways: dict[str, tuple[GatewayHeartbeat, float]] = {}
        self.services = LastServices()
        self.named_adapters = NamedAdapters()
        self._workers_names = WorkersNames()
        self.liveness = Liveness(limits, on_dead, on_reconnected)
        self.hosted = HostedModels()
        self.started = time.time()
        self._began_at = time.monotonic()

    @property
    def is_eldest(self) -> bool:
        """Whether this is the oldest gateway that is alive: it alone shows the fleet's figures to Prometheus."""
        own = (self.started, self._gateway)
        return all(own <= (other.started, other.gateway) for other, _ in self._gateways.values())

    def workers(self, model: str | None = None) -> list[Heartbeat]:
        """Return the last heartbeats of all workers of a model, or of any, that are not dead, draining ones too."""
        return [beat for beat in self.liveness.live() if model in (None, beat.model)]

    def has_room_for(self, worker: str) -> bool:
        """Whether heartbeats of this worker are taken in: it is known, or there are fewer than `MAX_WORKERS`."""
        return self.liveness.num_workers < MAX_WORKERS or self.liveness.knows(worker)

    def serves_another(self, worker: str, model: str) -> bool:
        """Whether a live worker of this name serves another model: a login for one model speaks for its own alone."""
        return self.liveness.model_of(worker) not in (None, model)

    def num_devices(self, worker: str) -> int:
        """Return how many devices a worker has, by its last heartbeat; 1 where that does not say."""
        heartbeat = self.liveness.last_heartbeat(worker)
        return 1 if heartbeat is None or heartbeat.metrics is None else max(1, len(heartbeat.metrics.ranks))

    def revision(self, worker: str | None) -> str:
        """Return the revision that a worker serves, by its last heartbeat; "" if it is not known."""
        heartbeat = None if worker is None else self.liveness.last_heartbeat(worker)
        return "" if heartbeat is None else heartbeat.revision

    def note_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat. `now` is loop time, here and below."""
        self._loads.clear()
        self._known_models[heartbeat.model] = now
        previous = self.liveness.last_heartbeat(heartbeat.worker)
        self.liveness.note_heartbeat(heartbeat, now)
        self.services.note(heartbeat, now)
        # Not those of a second process of its name.
        if self.liveness.last_heartbeat(heartbeat.worker) is heartbeat:
            self._workers_names.note(heartbeat)
        if previous is None or _trait_fields(previous) != _trait_fields(heartbeat):
            self._changed_models.add(heartbeat.model)

    def note_gateway_heartbeat(self, heartbeat: GatewayHeartbeat, now: float) -> None:
        """Take in another gateway's heartbeat."""
        is_known = heartbeat.gateway in self._gateways
        if heartbeat.gateway != self._gateway and (is_known or len(self._gateways) < MAX_GATEWAYS):
            self._loads.clear()
            self._gateways[heartbeat.gateway] = (heartbeat, now)

    def note_host_beat(self, beat: HostBeat, now: float) -> None:
        """Record a host's heartbeat: its models are known even while no worker serves them."""
        self.hosted.note_beat(beat, now)
        self._known_models |= dict.fromkeys((model.name for model in beat.models), now)
        self._loads.clear()

    @property
    def gateways(self) -> frozenset[str]:
        """The other gateways that are alive."""
        return frozenset(self._gateways)

    def do_gateways_understand(self, feature: str) -> bool:
        """Whether all gateways have a feature; False until those that run must have been heard."""
        is_young = time.monotonic() - self._began_at <= GATEWAY_SILENCE_S
        return not is_young and all(feature in heartbeat.features for heartbeat, _ in self._gateways.values())

    def gateways_behind(self, read: NamesRead) -> dict[str, NamesRead | None]:
        """Return the other gateways that have not reported reading names that far, with their last reports."""
        told = ((name, heartbeat.adapter_names) for name, (heartbeat, _) in self._gateways.items())
        return {name: own for name, own in told if own is None or own.created != read.created or own.seq < read.seq}

    def discount_pause(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of workers and gateways: this process was paused."""
        self.liveness.discount_pause(lost_s, now)
        self._discount_gateways(lost_s, now)

    def discount_silence(self, lost_s: float, now: float) -> None:
        """Do not count the last `lost_s` seconds as silence of workers and gateways: NATS was silent."""
        self.liveness.discount_silence(lost_s, now)
        self._discount_gateways(lost_s, now)

    def _discount_gateways(self, lost_s: float, now: float) -> None:
        for name, (heartbeat, last_seen_at) in self._gateways.items():
            self._gateways[name] = (heartbeat, min(now, last_seen_at + lost_s))
        self.hosted.discount_silence(lost_s, now)

    def sweep(self, now: float) -> None:
        """Find the dead. Called several times in a heartbeat."""
        silent = [name for name, (_, last_seen_at) in self._gateways.items() if now - last_seen_at > GATEWAY_SILENCE_S]
        for name in silent:
            del self._gateways[name]
        # As long as those that die now are there.
        self._note_traits()
        has_deaths = self.liveness.sweep(now)
        if self.hosted.sweep(now) or has_deaths or silent:
            self._loads.clear()
        if has_deaths:
            self._changed_models.update(self._traits)
            self._note_traits()
        if now - self._models_reviewed_at >= REVIEW_INTERVAL_S:
            self._models_reviewed_at = now
            self._forget_models(now)

    def models(self) -> list[str]:
        """Return the models that live workers serve, sorted."""
        return sorted({heartbeat.model for heartbeat in self.liveness.live()})

    def served_models(self) -> list[str]:
        """Return the models that requests may name: those of live workers, and those that hosts load on demand."""
        return sorted({*self.models(), *self.hosted.names()})

    def has_failed(self, model: str) -> bool:
        """Whether the host of a model cannot start a worker of it, and none serves it."""
        coming = self.coming(model)
        return coming is not None and coming.state == "failed"

    def coming(self, model: str) -> HostedModel | None:
        """Return how a host is about to serve a model; None while a worker takes its requests, or if no host will."""
        if self._takers(model):
            return None
        return self.hosted.find(model, len(self.workers(model)))

    def knows(self, name: str) -> bool:
        """Whether a name is that of a model which live workers serve, or served minutes ago."""
        return name in self._known_models

    def adapters(self, tenant: str | None = None) -> dict[str, str]:
        """Return the models of the adapters that a tenant can use now, by the adapters' names."""
        names = {each.name for each in self.named_adapters.of_tenant(tenant)}
        names |= {beat.name for h in self.liveness.live() for beat in h.adapters}
        found = {name: self.find_adapter(name, tenant) for name in sorted(names)}
        return {name: each.model for name, each in found.items() if each is not None and each.digest is not None}

    def find_adapter(self, name: str, tenant: str | None = None) -> FoundAdapter | None:
        """Return the adapter that a tenant means by a name, and its model; None where it is a model's, or unknown."""
        if name in self._known_models:
            return None
        own = self._workers_names
        return find_adapter(self.named_adapters, own, name, tenant, self.liveness.live(), self._takers_or_last)

    def settles(self, name: str, tenant: str | None) -> bool:
        """Whether a name is a model's, or an operator's for an adapter, regardless of workers' own names."""
        return self.knows(name) or self.named_adapters.find(name, tenant) is not None

    def _takers_or_last(self, model: str) -> list[Heartbeat]:
        """Return the takers of a model, or its last worker's heartbeat if a host is about to serve it again."""
        coming = self.coming(model)
        return self._takers(model) if coming is None or coming.last is None else [coming.last]

    def is_ready(self, model: str | None = None) -> bool:
        """Whether a live worker takes new requests of a model, or of any."""
        return any(model in (None, h.model) and not h.draining for h in self.liveness.live())

    def num_workers(self, model: str) -> int:
        """Count the live workers of a model that take new requests."""
        return len(self._takers(model))

    def reported_load(self, model: str) -> FleetLoad | None:
        """Return a model's load, summed over the heartbeats of its takers; None if it had no worker for minutes.

        While no heartbeats arrive at all, no model is unknown. This gateway's requests since then are left out.
        """
        return self._loads.get(model) or self._sum_up(model)

    def load(self, model: str) -> FleetLoad | None:
        """Return `reported_load` plus the requests that this gateway has queued since, to decide about the queue."""
        load = self._loads.get(model) or self._sum_up(model)
        own = self._own.unshown(model)
        if load is None or own[0] == 0:
            return load
        queued_requests, queued_tokens = load.queued_requests + own[0], load.queued_tokens + own[1]
        return msgspec.structs.replace(load, queued_requests=queued_requests, queued_tokens=queued_tokens)

    def can_claim(self, model: str, queue: Queue, stream_seq: int, published_at: float, since: float) -> bool:
        """Whether a worker with room has read its messages and reports an empty queue: the request was lost."""
        idle = [h for h in self._takers(model) if takes(h, queue) and sees_empty_queue(h)]
        has_read = self.liveness.has_read
        return any(h.running < h.max_num_seqs and has_read(h, queue, stream_seq, published_at, since) for h in idle)

    def takes(self, model: str, queue: Queue) -> bool:
        """Return whether a worker of a model takes from a queue at present."""
        return any(takes(h, queue) for h in self._takers(model))

    def has_room_elsewhere(self, model: str, worker: str, num_tokens: int, *, has_output: bool) -> bool:
        """Whether another worker of a model could run a sequence of `num_tokens` at once."""
        # A prefill worker that computed a stream's prompt again would hand it over, where another worker decodes.
        queue: Queue = "ready" if has_output and self.takes(model, "ready") else "resumed"
        return any(
            h.worker != worker
            and takes(h, queue)
            and sees_empty_queue(h)
            and h.running < h.max_num_seqs
            and h.free_blocks * h.block_size > num_tokens
            for h in self._takers(model)
        )

    def takers_of_resumed(self, model: str) -> tuple[int, int]:
        """Count the live workers of a model that pull the queue of resumed requests, and all of its live ones."""
        beats = self.workers(model)
        return sum("resumed" in beat.features for beat in beats), len(beats)

    def pulled(self, model: str, queue: Queue) -> tuple[int, int]:
        """Return the stream sequences after which, and up to which, all requests of a queue are with some worker.

        Those up to the highest that a worker has given back may wait again.
        """
        return pulled_between(self.workers(model), queue)

    def waiting_for_prefix(self, model: str) -> frozenset[int]:
        """Return the stream sequences of a model's requests that wait in a worker for the holder of their prefix."""
        news = [beat.prefixes for beat in self.workers(model) if beat.prefixes is not None]
        return frozenset(sequence for each in news for sequence in each.waiting)

    def _sum_up(self, model: str) -> FleetLoad | None:
        workers = self._takers(model)
        if not workers and model not in self._known_models and any(True for _ in self.liveness.live()):
            return None
        gateways = [heartbeat for heartbeat, _ in self._gateways.values()]
        waiting = credible_waiting(model, workers, gateways, self._own.awaited())
        if not workers:
            self._note_traits()
        coming = self.coming(model)
        told = workers if coming is None or coming.last is None else [coming.last]
        traits = _answer_traits(told) if told else self._traits.get(model, _AnswerTraits())
        load = _fleet_load(model, workers, gateways, waiting, traits)
        if coming is not None:
            load = coming_load(load, coming)
        # While no worker is heard, clients may name any number of models.
        if model in self._known_models:
            self._loads[model] = load
        return load

    def _forget_models(self, now: float) -> None:
        # While NATS is away, the workers that were heard before still count.
        self._known_models |= dict.fromkeys((heartbeat.model for heartbeat in self.liveness.live()), now)
        old = [model for model, at in self._known_models.items() if now - at > MODEL_MEMORY_S]
        if (excess := len(self._known_models) - len(old) - MAX_WORKERS) > 0:
            old += sorted(set(self._known_models).difference(old), key=self._known_models.__getitem__)[:excess]
        for model in old:
            del self._known_models[model]
            self._traits.pop(model, None)
            self._loads.pop(model, None)
        self._workers_names.review(self.workers(), self._known_models)

    def _note_traits(self) -> None:
        """Add up changes. All at once: a login that may send heartbeats can make up workers."""
        if not self._changed_models:
            return
        heard: defaultdict[str, list[Heartbeat]] = defaultdict(list)
        for heartbeat in self.liveness.live():
            if heartbeat.model in self._changed_models:
                heard[heartbeat.model].append(heartbeat)
        self._changed_models.clear()
        for model, workers in heard.items():
            self._traits[model] = _answer_traits([h for h in workers if not h.draining] or workers)

    def _takers(self, model: str) -> list[Heartbeat]:
        return [h for h in self.liveness.live() if h.model == model and not h.draining]


# Fields of heartbeats that are added up, under the same names.
_SUMMED = (
    *("running", "prefill_rate", "decode_rate", "free_blocks", "total_blocks"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)


def _fleet_load(
    model: str,
    workers: list[Heartbeat],
    gateways: list[GatewayHeartbeat],
    waiting: tuple[int, int],
    traits: _AnswerTraits,
) -> FleetLoad:
    unclaimed, bounds = (
        [unclaimed_of(gateway, model) for gateway in gateways],
        [h.max_prompt_characters for h in workers],
    )
    revisions = tuple(sorted({h.revision for h in workers}))
    return FleetLoad(
        model=model,
        num_workers=len(workers),
        queued_requests=waiting[0] + sum(requests for requests, _ in unclaimed),
        queued_tokens=waiting[1] + sum(tokens for _, tokens in unclaimed),
        block_size=max((h.block_size for h in workers), default=1),
        max_model_len=min((h.max_model_len for h in workers), default=0),
        longest_model_len=max((h.max_model_len for h in workers), default=0),
        free_slots=sum(max(0, h.max_num_seqs - h.running) for h in workers),
        revisions=revisions,
        fingerprint=fingerprint_of(revisions),
        num_gateways=1 + len(gateways),
        tasks=frozenset(task for h in workers for task in h.tasks),
        features=frozenset.intersection(*(frozenset(h.features) for h in workers)) if workers else frozenset(),
        some_features=frozenset(feature for h in workers for feature in h.features),
        chat_format=traits.chat_format,
        sampling_defaults=traits.sampling_defaults,
        # 0, for no bound, if one of them has none.
        max_prompt_characters=0 if 0 in bounds else max(bounds, default=0),
        **{name: sum(map(attrgetter(name), workers)) for name in _SUMMED},
    )


@dataclass(frozen=True, slots=True)
class _AnswerTraits:
    """How the answers of a model are to be read and sampled, as most of its workers say."""

    chat_format: str = ""
    sampling_defaults: SamplingDefaults | None = None


def _trait_fields(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.model, heartbeat.draining, heartbeat.chat_format, heartbeat.sampling_defaults


def _answer_traits(workers: list[Heartbeat]) -> _AnswerTraits:
    return _AnswerTraits(
        _most_common([worker.chat_format for worker in workers]),
        _most_common([worker.sampling_defaults for worker in workers]),
    )


def _most_common(values: list[_T]) -> _T:
    """Return the value that occurs most often; of several, the same one whichever worker came first."""
    return max(sorted(set(values), key=repr), key=values.count)
