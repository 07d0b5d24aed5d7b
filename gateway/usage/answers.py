"""Shapes of the answers about usage."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gateway.api.operation import Operation


class ModelUsage(Struct, forbid_unknown_fields=True):
    """What the tenant has had of one model in one lane.

    `device_seconds` are its shares of what devices computed, `energy_joules` those of devices that tell, and `cost` is
    `device_seconds` at the operator's price; null without one.
    """

    model: str
    lane: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_seconds: float
    energy_joules: float
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
    """A result in a bucket of OpenAI's usage API. What is not told apart is null."""

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
