"""Data for the console: usage of tenants, their keys and limits, dead letters, and the live state.

The state of workers, queues and counts is made at most once a second, however many look.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import msgspec
from msgspec.structs import asdict
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.admission.auth import KeyStore
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.timelines.exchange import TimelineExchange
from shared.dead_letters import DeadLetter
from shared.errors import ConfigError
from shared.messages import UNDECODABLE, Heartbeat
from shared.streams import DEAD_STREAM
from shared.timeline import GatewayCounts
from shared.usage_ledger import read_usage
from shared.worker_metrics import WorkerMetrics

MAX_TOTALS = 6000
MAX_LETTERS = 100
MAX_LOOKED_AT = 500
MAX_TEXT = 500


async def tenants_view(js: JetStreamContext, keys: KeyStore, device_hour_cost: float | None) -> dict[str, Any]:
    """Return the use of tenants since the system was set up, the limits of tenants, and keys without their hashes.

    Raises:
        ApiError: 503; NATS does not answer. 500; the key file cannot be read.
    """
    use: defaultdict[tuple[str, str, str], dict[str, Any]] = defaultdict(dict)
    try:
        async for each in read_usage(js, MAX_TOTALS):
            use[each.tenant, each.model, each.lane][each.measure] = each.total
    except (NatsError, OSError) as error:
        raise nats_away("the use of tenants") from error
    try:
        records, limits = keys.listing()
    except ConfigError as error:
        raise ApiError(500, f"The key file cannot be read: {error}", code="keys_unreadable") from error
    rows = [{"tenant": tenant, "model": model, "lane": lane} | counts for (tenant, model, lane), counts in use.items()]
    for row in rows:
        row["cost"] = None if device_hour_cost is None else row.get("device_us", 0) / 3.6e9 * device_hour_cost
    shown = [{name: value for name, value in asdict(record).items() if name != "sha256"} for record in records]
    use_first = sorted(rows, key=lambda row: (row["tenant"], row["model"], row["lane"]))
    return {"use": use_first, "limits": [asdict(record) for record in limits], "keys": shown}


async def dead_letters_view(js: JetStreamContext, *, shows_prompts: bool) -> dict[str, Any]:
    """Return the newest dead letters, the last one first.

    Raises:
        ApiError: 503; NATS does not answer, or this login may not read them.
    """
    letters: list[dict[str, Any]] = []
    try:
        state = (await js.stream_info(DEAD_STREAM)).state
        seq = state.last_seq
        first = max(1, state.first_seq, seq - MAX_LOOKED_AT)
        while seq >= first and len(letters) < MAX_LETTERS and state.messages:
            try:
                message = await js.get_msg(DEAD_STREAM, seq=seq)
                letters.append(_letter(seq, message.data or b"", shows_prompts=shows_prompts))
            except msgspec.MsgspecError:
                pass  # of another version
            except NatsError as error:
                if getattr(error, "code", None) != 404:
                    raise
            seq -= 1
    except (NatsError, OSError) as error:
        raise nats_away("dead letters", "`headrace dead list` shows them") from error
    return {"letters": letters, "total": state.messages}


def _letter(seq: int, content: bytes, *, shows_prompts: bool) -> dict[str, Any]:
    try:
        letter = msgspec.msgpack.decode(content, type=DeadLetter)
    except UNDECODABLE as error:
        raise msgspec.MsgspecError(str(error)) from error
    request = letter.request
    text = request.text if request.text is not None else request.messages[-1].content if request.messages else None
    return {
        "seq": seq,
        "id": request.id,
        "request_id": request.trace,
        "tenant": request.tenant,
        "model": request.model,
        "lane": request.lane,
        "reason": letter.reason,
        "error": letter.error,
        "quarantined": letter.quarantined,
        "by": letter.quarantined_by,
        "attempts": [asdict(attempt) for attempt in letter.attempts],
        "prompt": str(text)[-MAX_TEXT:] if shows_prompts and text is not None else None,
    }


def nats_away(what: str, instead: str = "try again") -> ApiError:
    """Return the 503 that names the data that could not be read."""
    message = f"NATS does not tell {what}: it is away, or this login may not read them; {instead}."
    return ApiError(503, message, code="records_unavailable", retry_after_s=5.0)


FRESH_S = 1.0
MAX_WORKERS = 256
_LOAD = ("model", "num_workers", "running", "queued_requests", "queued_tokens", "prefill_rate", "decode_rate")
_BEAT = (
    *("worker", "pid", "model", "running", "waiting", "waiting_tokens", "free_blocks", "total_blocks"),
    *("max_num_seqs", "draining", "is_ending", "started"),
)
_COUNTS = ("prompt_tokens", "prefix_hits", "prefill_tokens", "generation_tokens", "preemptions", "failed_steps")
_BATCH = ("running_batch", "waiting_batch", "batch_pending", "batch_oldest_s", "resident_bytes", "dead_letters")
_NOTHING = WorkerMetrics()


def own_counts(gateway: str, dispatcher: Dispatcher, metrics: GatewayMetrics) -> GatewayCounts:
    """Return the counts of this process."""
    return GatewayCounts(
        gateway=gateway,
        streams=metrics.active_streams,
        completion_tokens=metrics.completion_tokens,
        prompt_tokens=metrics.prompt_tokens,
        unclaimed=dispatcher.flights.num_unclaimed(),
        oldest_s=dispatcher.oldest_unclaimed_s(),
        shed=dict(metrics.shed),
        limited=dict(metrics.limited),
        moves=dict(metrics.redispatches),
        sequences=dict(metrics.sequences),
        cpu_s=time.process_time(),
    )


class NowView:
    """Reads the fleet and the counts of all gateways."""

    def __init__(self, dispatcher: Dispatcher, exchange: TimelineExchange) -> None:
        self._dispatcher = dispatcher
        self._exchange = exchange
        self._made_at = float("-inf")
        self._view: dict[str, Any] = {}

    async def view(self) -> dict[str, Any]:
        """Return the state of the last second. Counts grow from the start of their process."""
        if time.monotonic() - self._made_at >= FRESH_S:
            # Set before the view is built: concurrent callers get the last one.
            self._made_at = time.monotonic()
            self._view = await self._make()
        return self._view or await self._make()

    async def _make(self) -> dict[str, Any]:
        fleet = self._dispatcher.fleet
        loads = [load for model in fleet.models() if (load := fleet.load(model)) is not None]
        beats = fleet.workers()
        counts = await self._exchange.counts()
        queues = []
        for load in loads:
            own = [beat.metrics or _NOTHING for beat in beats if beat.model == load.model]
            jobs = sum(each.waiting_batch for each in own) + max((each.batch_pending for each in own), default=0)
            age_s = max((each.batch_oldest_s for each in own), default=0.0)
            waiting = load.queued_requests
            waited_s = max((each.oldest_s.get(load.model, 0.0) for each in counts), default=0.0)
            queues.append({"model": load.model, "lane": "interactive", "waiting": waiting, "oldest_s": waited_s})
            queues.append({"model": load.model, "lane": "batch", "waiting": jobs, "oldest_s": age_s})
        return {
            "at": time.time(),
            "models": [{name: getattr(load, name) for name in _LOAD} for load in loads],
            "queues": queues,
            "workers": [_worker(beat) for beat in beats[:MAX_WORKERS]],
            "num_workers": len(beats),
            "hosts": fleet.hosted.shown(),
            "gateways": [asdict(each) for each in counts],
        }


def _worker(beat: Heartbeat) -> dict[str, Any]:
    metrics = beat.metrics or _NOTHING
    told: dict[str, Any] = {name: getattr(beat, name) for name in _BEAT}
    told |= {name: getattr(metrics, name) for name in (*_COUNTS, *_BATCH)}
    steps = metrics.step_seconds
    told["busy_s"] = 0.0 if steps is None else steps.total
    told["golden"] = None if metrics.golden is None else asdict(metrics.golden)
    told["role"] = None if beat.roles is None else beat.roles.role
    told["gpus"] = [asdict(gpu) for gpu in metrics.gpus]
    return told
