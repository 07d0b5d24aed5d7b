"""What a host knows and reports of a model: its state, how many requests wait for it, and when it will serve.

Work queues keep a message until its request is claimed, so the queue alone shows the demand: no gateway has to report
it, and jobs that other clients publish wake a model too.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from ops.stack.config import HostSettings
from ops.stack.hosting.reconcile import Activity, SeenWorker
from ops.stack.hosting.wishes import Wish
from ops.stack.hosting.worker_process import DRAIN_S, HostedWorker
from shared.batch_streams import batch_stream, batch_tenants
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.hosted_models import HostedModel, HostedState
from shared.streams import INTERACTIVE_STREAM
from shared.subjects import READY_SUFFIX, encode_name

# Starts that fail in a row until a model counts as failed.
MAX_FAILURES = 3
# The pause after a start that failed, which doubles, and after the last one.
FIRST_PAUSE_S, RETRY_FAILED_S = 1.0, 60.0
# Of a model that was never loaded: its process, and its weights from a disk.
START_S, READ_BYTES_PER_S = 8.0, 500e6
# Where nothing can be said of when there will be room.
UNKNOWN_ROOM_S = 5.0


@dataclass(slots=True)
class KnownModel:
    """Written by the host.

    Attributes:
        error: Why a worker failed to start the last time; None when it did not.
        replace_error: Why the last replacement was undone; None when it was not.
    """

    activity: Activity
    failures: int = 0
    error: str | None = None
    has_room: bool = True
    wakes: int = 0
    replace_error: str | None = None

    def note_failure(self, error: str, now: float, *, was_well: bool, is_final: bool) -> bool:
        """Take note of a worker that ended by itself; return whether the model counts as failed now.

        It had served for a while (`was_well`), or the next start would end alike (`is_final`).
        """
        self.error = error[:1000]
        self.failures = MAX_FAILURES if is_final else 1 if was_well else self.failures + 1
        has_failed = self.failures >= MAX_FAILURES
        if has_failed:
            self.activity.asked = False
        self.activity.may_start_at = now + (RETRY_FAILED_S if has_failed else FIRST_PAUSE_S * 2 ** (self.failures - 1))
        return has_failed


def told_of(
    wish: Wish,
    model: KnownModel,
    workers: Sequence[HostedWorker],
    settings: HostSettings,
    now: float,
    ahead: Sequence[Wish] = (),
) -> HostedModel:
    """Return the model's state as sent to gateways; `ahead` are the models that get room before it (`is_ahead`)."""
    own = [worker for worker in workers if worker.wish.name == wish.name]
    current = [worker for worker in own if worker.wish.generation == wish.generation]
    ready = [worker for worker in current if worker.phase == "ready"]
    state = _state(wish, model, own, now)
    return HostedModel(
        name=wish.name,
        path=wish.path,
        state=state,
        on_demand=wish.on_demand,
        num_ready=len(ready),
        num_withheld=sum(worker.beat is not None and worker.beat.draining for worker in ready),
        ready_in_s=round(_ready_in_s(wish, state, model.activity, workers, settings, now, ahead), 2),
        need_bytes=wish.need_bytes,
        error=model.error,
        replace_error=model.replace_error,
        load_s=wish.load_s,
        wakes=model.wakes,
        last=wish.last,
    )


def is_ahead(other: KnownModel, model: KnownModel, now: float) -> bool:
    """Whether another model waits for room, and gets it before one whose next request comes now."""
    activity = other.activity
    if math.isinf(activity.waits_since) or activity.may_start_at > now:
        return False
    return activity.turn < (False, False, min(model.activity.waits_since, now))


def _state(wish: Wish, model: KnownModel, own: Sequence[HostedWorker], now: float) -> HostedState:
    phases = {worker.phase for worker in own}
    activity = model.activity
    if "ready" in phases:
        return "awake"
    if model.failures >= MAX_FAILURES and now < activity.may_start_at:
        return "failed"
    if "loading" in phases:
        return "loading"
    if not wish.on_demand or activity.asked or activity.waiting > 0:
        return "loading" if model.has_room else "no_room"
    return "stopping" if "stopping" in phases else "asleep"


def _ready_in_s(
    wish: Wish,
    state: HostedState,
    activity: Activity,
    workers: Sequence[HostedWorker],
    settings: HostSettings,
    now: float,
    ahead: Sequence[Wish],
) -> float:
    """Predict when a worker serves a request that comes now, from how long its last start took."""
    if state == "awake":
        return 0.0
    load_s = _load_s(wish)
    begun = [now - w.started_at for w in workers if w.wish.name == wish.name and w.phase == "loading"]
    if begun:
        # One that is late is taken to need as long again as it is late.
        return max(load_s / 10, abs(load_s - max(begun)))
    budget = settings.host_memory_bytes
    if state == "stopping" or budget is None:
        return load_s
    others = [worker.seen() for worker in workers if worker.wish.name != wish.name and worker.wish.on_demand]
    waited_s = max(0.0, now - activity.waits_since)
    turns = sorted((_turn_s(other, waited_s, settings.min_awake_s, now), other.need_bytes) for other in others)
    missing = sum(worker.wish.need_bytes for worker in workers) + wish.need_bytes - budget
    room_s = _room_s(turns, missing)
    if not ahead or room_s is None:
        return load_s + (UNKNOWN_ROOM_S if room_s is None else room_s)
    beside_s = _room_s(turns, missing + sum(each.need_bytes for each in ahead))
    if beside_s is not None:
        return load_s + beside_s
    # There is no room for all of them at once: each of those ahead has its turn first, and may take its time to drain.
    return load_s + room_s + sum(_load_s(each) + settings.min_awake_s + DRAIN_S for each in ahead)


def _load_s(wish: Wish) -> float:
    return wish.load_s or START_S + wish.need_bytes / READ_BYTES_PER_S


def _room_s(turns: Sequence[tuple[float, int]], missing: int) -> float | None:
    """Return the seconds until others, in the order in which they give way, free `missing`; None if they never do."""
    after_s = 0.0
    for turn_s, freed in turns:
        if missing <= 0:
            break
        missing, after_s = missing - freed, turn_s
    return after_s if missing <= 0 else None


def _turn_s(other: SeenWorker, waited_s: float, min_awake_s: float, now: float) -> float:
    """Predict when another worker has given way to a model whose requests have waited for so long."""
    if other.phase == "stopping":
        return DRAIN_S if other.busy else 0.0
    left_s = max(0.0, min_awake_s - (now - other.ready_at))
    if other.serves_people:
        left_s = max(left_s, min_awake_s - waited_s)
    # For a busy model, the whole drain timeout: the announced time must hold.
    return left_s + DRAIN_S if other.busy else left_s


BATCH_INTERVAL_S = 2.0


class Waiting(NamedTuple):
    """How many requests wait for a model, and how many of them are batch jobs, which are not interactive."""

    num: int = 0
    num_batch: int = 0


class Demand:
    """Counts waiting requests. The batch queues, one for each tenant, are looked at less often."""

    def __init__(self, nats: DirectClient) -> None:
        self._nats = nats
        self._js = nats.jetstream()
        self._clock = asyncio.get_running_loop().time
        self._batch_at = float("-inf")
        self._batch: Counter[tuple[str, bool]] = Counter()

    async def count(self, models: Collection[str]) -> dict[str, Waiting]:
        """Return how many requests wait in the queues of each model; `DependencyError` if NATS does not say."""
        if not models:
            return {}
        try:
            waiting = await self._stored(INTERACTIVE_STREAM)
            if self._clock() - self._batch_at >= BATCH_INTERVAL_S:
                batch: Counter[tuple[str, bool]] = Counter()
                for tenant in await batch_tenants(self._nats, next(iter(models))):
                    batch += await self._stored(batch_stream(tenant))
                self._batch, self._batch_at = batch, self._clock()
        except (NatsError, OSError, ValueError) as error:
            raise DependencyError(f"NATS does not say what waits: {error!r}") from error
        waiting += self._batch
        counts = {model: [waiting[encode_name(model), is_batch] for is_batch in (False, True)] for model in models}
        return {model: Waiting(sum(found), found[True]) for model, found in counts.items()}

    async def _stored(self, stream: str) -> Counter[tuple[str, bool]]:
        """Return the number of messages of a queue by the token of their model, and whether they are batch jobs."""
        found: Counter[tuple[str, bool]] = Counter()
        try:
            info = await self._js.stream_info(stream, subjects_filter="hr.req.>")
        except NotFoundError:
            return found
        for subject, count in (info.state.subjects or {}).items():
            model, lane = subject.split(".")[2:4]
            found[model.removesuffix(READY_SUFFIX), lane == "batch"] += count
        return found
