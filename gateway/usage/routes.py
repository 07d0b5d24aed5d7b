"""`/v1/usage` and OpenAI's `/v1/organization/usage/completions`: what the tenant of a key has used, as NATS counts it.

A key reads its own tenant's usage and no other. Days are those of UTC; they are kept for 400 days, hours for a week,
totals for good.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct
from nats.js import JetStreamContext
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.api.operation import Operation
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.checks import check_query, invalid_value, missing_parameter, whole_number
from gateway.usage.reader import Counts, UsageReader
from shared.usage_ledger import DAYS_KEPT, Measure, day_of, hour_of

MAX_DAYS = 31
DAY_S = 86400
HOURS_KEPT = 168
_LAST_S = 253_402_300_799
_GROUPS = ("model", "batch")
_LISTS = ("models", "models[]", "group_by", "group_by[]")
_OPENAI = frozenset({"start_time", "end_time", "bucket_width", "limit", "page", "batch", *_LISTS})


class ModelUsage(Struct, forbid_unknown_fields=True):
    """What the tenant has had of one model in one lane.

    `device_seconds` are its shares of what devices computed, `energy_joules` those of devices that tell (null if none
    does), and `cost` is `device_seconds` at the operator's price; null without one.
    """

    model: str
    lane: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_seconds: float
    energy_joules: float | None
    cost: float | None
    cost_per_million_tokens: float | None


class TenantUsage(Struct, forbid_unknown_fields=True):
    """Usage of the key's tenant, from `start` to `end`: days of UTC, both included; null for all time."""

    object: Literal["usage"]
    tenant: str
    start: str | None
    end: str | None
    data: list[ModelUsage]


class CompletionsUsage(Struct, forbid_unknown_fields=True):
    """A result in a bucket of OpenAI's usage API. Fields by which results are not grouped are null."""

    object: Literal["organization.usage.completions.result"]
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int
    output_audio_tokens: int
    num_model_requests: int
    project_id: str | None
    user_id: str | None
    api_key_id: str | None
    model: str | None
    batch: bool | None
    service_tier: str | None


class UsageBucket(Struct, forbid_unknown_fields=True):
    """One day or hour of UTC, in Unix seconds."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[CompletionsUsage]


class UsagePage(Struct, forbid_unknown_fields=True):
    """Buckets, oldest first."""

    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


OPERATIONS = (
    Operation("get", "/v1/usage", "Show what the key's tenant has used.", TenantUsage),
    Operation("get", "/v1/organization/usage/completions", "The same by days or hours, in OpenAI's form.", UsagePage),
)


_TOLD: tuple[Measure, ...] = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class _Width:
    """The width of a bucket: its seconds, buckets of a page at most and by default, buckets kept, names and bound."""

    seconds: int
    most: int
    default: int
    num_kept: int
    name_of: Callable[[float], str]
    bound: str


_WIDTHS = {
    "1d": _Width(DAY_S, MAX_DAYS, 7, DAYS_KEPT, day_of, f"days are kept for {DAYS_KEPT}"),
    "1h": _Width(
        3600, HOURS_KEPT, 24, HOURS_KEPT, hour_of, "hours are kept for a week. Ask for days, 'bucket_width' '1d'"
    ),
}


class UsageRoutes:
    """Reads the ledger."""

    def __init__(self, services: RouteServices, js: JetStreamContext, device_hour_cost: float | None) -> None:
        self._services = services
        self._reader = UsageReader(js, services.limiter)
        self._cost = device_hour_cost

    def routes(self) -> list[KeyRoute]:
        """Return the table."""
        return [
            KeyRoute("GET", "/v1/usage", self._usage),
            KeyRoute("GET", "/v1/organization/usage/completions", self._completions),
        ]

    async def _usage(self, request: Request, principal: Principal) -> Response:
        allows = self._services.config.allow_unknown_parameters
        check_query(request, frozenset({"start", "end"}), allow_unknown=allows)
        query = request.query_params
        start, end = _date(query.getlist("start"), "start"), _date(query.getlist("end"), "end")
        days: list[str | None] = [None]
        if start is not None or end is not None:
            end = end or datetime.now(UTC)
            start = start or end - timedelta(days=MAX_DAYS - 1)
            num_days = (end - start).days + 1
            if not 1 <= num_days <= MAX_DAYS:
                raise invalid_value("start", f"'start' to 'end' must be 1 to {MAX_DAYS} days.")
            if (datetime.now(UTC) - start).days > DAYS_KEPT:
                raise invalid_value("start", f"'start' is more than {DAYS_KEPT} days ago: no days are kept for longer.")
            days = [day_of((start + timedelta(days=number)).timestamp()) for number in range(num_days)]
        totals: Counts = defaultdict(lambda: defaultdict(int))
        for counts in await self._reader.read(principal, days):
            for key, measures in counts.items():
                for measure, count in measures.items():
                    totals[key][measure] += count
        data = [self._model_usage(*key, counts) for key, counts in sorted(totals.items())]
        first, last = (
            (None, None) if start is None or end is None else (start.date().isoformat(), end.date().isoformat())
        )
        return json_response(TenantUsage("usage", principal.tenant, first, last, data))

    async def _completions(self, request: Request, principal: Principal) -> Response:
        query, (groups, width) = request.query_params, self._asked(request)
        size, now = width.seconds, int(time.time())
        start, end = _span(query, width, now)
        limit = whole_number(query.get("limit"), "limit", 1, width.most, width.default)
        # Hours of the previous page's time may have expired since: this page begins with the first one still kept.
        page = max(start, whole_number(query.get("page"), "page", 0, _LAST_S, start) // size * size)
        begins = range(page, max(page, end), size)
        shown, models = begins[:limit], {*query.getlist("models"), *query.getlist("models[]")}
        counted = await self._reader.read(principal, [width.name_of(begin) for begin in shown], _TOLD)
        only = _flag(query.get("batch"))
        buckets = [
            UsageBucket("bucket", begin, begin + size, _results(counts, groups, models, only_batch=only))
            for begin, counts in zip(shown, counted, strict=True)
        ]
        has_more = len(begins) > limit
        return json_response(UsagePage("page", buckets, has_more, str(begins[limit]) if has_more else None))

    def _asked(self, request: Request) -> tuple[set[str], _Width]:
        query = request.query_params
        check_query(request, _OPENAI, allow_unknown=self._services.config.allow_unknown_parameters)
        if query.get("start_time") is None:
            raise missing_parameter("start_time")
        width = _WIDTHS.get(query.get("bucket_width", "1d"))
        if width is None:
            message = "'bucket_width' must be '1d' or '1h': usage is kept by days and hours, and not by minutes."
            raise invalid_value("bucket_width", message)
        groups = {*query.getlist("group_by"), *query.getlist("group_by[]")}
        if not groups <= {*_GROUPS}:
            raise invalid_value("group_by", f"'group_by' must be of {', '.join(_GROUPS)}, which usage tells apart.")
        return groups, width

    def _model_usage(self, model: str, lane: str, counts: dict[str, int]) -> ModelUsage:
        device_s, energy_mj = counts.get("device_us", 0) / 1e6, counts.get("energy_mj", 0)
        prompt, completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
        cost = None if self._cost is None else device_s / 3600 * self._cost
        return ModelUsage(
            model=model,
            lane=lane,
            requests=counts.get("requests", 0),
            prompt_tokens=prompt,
            cached_tokens=counts.get("cached_tokens", 0),
            completion_tokens=completion,
            device_seconds=device_s,
            energy_joules=energy_mj / 1e3 if energy_mj else None,
            cost=cost,
            cost_per_million_tokens=1e6 * cost / (prompt + completion) if cost and prompt + completion else None,
        )


def _span(query: QueryParams, width: _Width, now: int) -> tuple[int, int]:
    """Return the start of the first bucket, and the end, at most now; `ApiError` 400 for a period no longer kept."""
    size = width.seconds
    asked = whole_number(query.get("start_time"), "start_time", 0, _LAST_S, 0)
    end = whole_number(query.get("end_time"), "end_time", 0, _LAST_S, max(now, asked))
    if end < asked:
        raise invalid_value("end_time", f"'end_time' ({end}) is before 'start_time' ({asked}).")
    first = (now // size - width.num_kept) * size
    if asked < first and query.get("page") is None:
        raise invalid_value("start_time", f"'start_time' is before {first}: {width.bound}.")
    return max(asked // size * size, first), min(now, end)


def _date(texts: list[str], name: str) -> datetime | None:
    if not texts:
        return None
    try:
        (text,) = texts
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise invalid_value(name, f"'{name}' must be one day, as 2026-11-29.") from None


def _flag(text: str | None) -> bool | None:
    if text not in (None, "true", "false"):
        raise invalid_value("batch", "'batch' must be true or false.")
    return None if text is None else text == "true"


def _results(counts: Counts, groups: set[str], models: set[str], *, only_batch: bool | None) -> list[CompletionsUsage]:
    """Return the results of a bucket, one for each group; of no group, one for all that there is."""
    added: dict[tuple[str | None, bool | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (model, lane), measures in counts.items():
        if (models and model not in models) or (only_batch is not None and only_batch != (lane == "batch")):
            continue
        group = (model if "model" in groups else None, lane == "batch" if "batch" in groups else None)
        for measure, count in measures.items():
            added[group][measure] += count
    return [
        CompletionsUsage(
            object="organization.usage.completions.result",
            input_tokens=each["prompt_tokens"],
            output_tokens=each["completion_tokens"],
            input_cached_tokens=each["cached_tokens"],
            input_audio_tokens=0,
            output_audio_tokens=0,
            num_model_requests=each["requests"],
            project_id=None,
            user_id=None,
            api_key_id=None,
            model=model,
            batch=is_batch,
            service_tier=None,
        )
        for (model, is_batch), each in sorted(added.items(), key=lambda entry: str(entry[0]))
    ]
