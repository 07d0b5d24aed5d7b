"""Aliases and canaries at the operator's port."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.aliases.book import AliasBook, has_workers, is_served
from gateway.aliases.comparison import ArmCounts, verdict_so_far
from gateway.aliases.store import AliasStore
from gateway.aliases.table import (
    Alias,
    Canary,
    IsServed,
    Name,
    Percent,
    Rules,
    end_canary,
    remove_alias,
    set_alias,
    set_percent,
    start_canary,
)
from gateway.api.operator_app import OperatorRoute
from gateway.api.routes import RouteServices, json_response
from gateway.api.schemas.decoding import decode_typed
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from shared.audit import audited
from shared.direct_client import DirectClient
from shared.errors import ConfigError
from shared.task_supervisor import TaskSupervisor


class AliasBody(Struct, forbid_unknown_fields=True):
    """Let a name stand for a model, for one tenant or for all."""

    name: Name
    model: Name
    tenant: Name | None = None


class RemoveBody(Struct, forbid_unknown_fields=True):
    """Remove an alias."""

    name: Name
    tenant: Name | None = None


class RulesBody(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that a person may have misspelled."""


class CanaryBody(Struct, forbid_unknown_fields=True):
    """Start a canary; `rules` that are left out have their defaults."""

    alias: Name
    model: Name
    percent: Percent
    tenant: Name | None = None
    rules: RulesBody = RulesBody()


class ChangeBody(Struct, forbid_unknown_fields=True):
    """Promote a canary, roll it back, or change its share."""

    alias: Name
    action: Literal["promote", "rollback", "percent"]
    tenant: Name | None = None
    percent: Percent | None = None


async def alias_routes(
    stack: contextlib.AsyncExitStack,
    services: RouteServices,
    nats: DirectClient,
    gateway: str,
    tasks: TaskSupervisor,
) -> list[OperatorRoute]:
    """Return the routes, and keep this process's view of aliases current until the stack ends."""
    store = AliasStore(nats, gateway, services.aliases, services.metrics, services.config.audit_file)
    await store.start()
    task = tasks.start(store.watch_forever(), "aliases")
    stack.push_async_callback(tasks.stop, task)
    return AliasRoutes(store, services.aliases, services.fleet, services.config.audit_file).routes()


class AliasRoutes:
    """The handlers. Each change is in the audit log, where the gateway has one."""

    def __init__(self, store: AliasStore, book: AliasBook, fleet: Fleet, audit_file: Path | None) -> None:
        self._store = store
        self._book = book
        self._fleet = fleet
        self._audit_file = audit_file

    def routes(self) -> list[OperatorRoute]:
        """Return the table."""
        return [
            OperatorRoute("/v1/aliases", self._list),
            OperatorRoute("/v1/aliases", self._set, method="POST"),
            OperatorRoute("/v1/aliases/remove", self._remove, method="POST"),
            OperatorRoute("/v1/canaries", self._canaries),
            OperatorRoute("/v1/canaries", self._start, method="POST"),
            OperatorRoute("/v1/canaries/change", self._change, method="POST"),
        ]

    async def _list(self, request: Request) -> Response:
        return json_response({"aliases": [self._shown(each) for each in self._book.table.aliases]})

    async def _set(self, request: Request) -> Response:
        body = decode_typed(AliasBody, await request.body())
        with self._audited("alias.set", body):
            is_served, is_hidden = self._is_served(body.tenant), self._is_hidden(body.tenant)
            set_ = partial(set_alias, is_served=is_served, is_hidden=is_hidden, now=time.time())
            await self._store.change(lambda table: set_(table, body.name, body.model, body.tenant))
        return await self._list(request)

    async def _remove(self, request: Request) -> Response:
        body = decode_typed(RemoveBody, await request.body())
        with self._audited("alias.remove", body):
            await self._store.change(lambda table: remove_alias(table, body.name, body.tenant))
        return await self._list(request)

    async def _canaries(self, request: Request) -> Response:
        found = [(each, each.canary) for each in self._book.table.aliases if each.canary is not None]
        return json_response({"canaries": [self._shown_canary(alias, canary) for alias, canary in found]})

    async def _start(self, request: Request) -> Response:
        body = decode_typed(CanaryBody, await request.body())
        rules = msgspec.convert(body.rules, Rules, from_attributes=True)
        start = partial(start_canary, rules=rules, now=time.time(), is_served=self._is_served(body.tenant))
        with self._audited("canary.start", body):
            await self._store.change(lambda table: start(table, body.alias, body.tenant, body.model, body.percent))
        return await self._canaries(request)

    async def _change(self, request: Request) -> Response:
        body = decode_typed(ChangeBody, await request.body())
        percent = body.percent
        if (percent is None) == (body.action == "percent"):
            raise ApiError(400, "'percent' goes with the action `percent`, and with no other.", param="percent")
        with self._audited(f"canary.{body.action}", body):
            if percent is not None:
                await self._store.change(lambda table: set_percent(table, body.alias, body.tenant, percent))
            else:
                state: Literal["promoted", "rolled_back"] = "promoted" if body.action == "promote" else "rolled_back"
                end = partial(end_canary, state=state, reason="by an operator", now=time.time())
                await self._store.change(lambda table: end(table, body.alias, body.tenant))
        return await self._canaries(request)

    @contextlib.contextmanager
    def _audited(self, action: str, body: Struct) -> Iterator[None]:
        if self._audit_file is None:
            yield
            return
        what = msgspec.to_builtins(body)
        # It is the line's own.
        what.pop("action", None)
        try:
            with audited(self._audit_file, action, **what):
                yield
        except ConfigError as error:
            raise ApiError(500, f"The audit log cannot be written: {error}", code="audit_unavailable") from error

    def _is_served(self, tenant: str | None) -> IsServed:
        return partial(is_served, self._fleet, tenant=tenant)

    def _is_hidden(self, tenant: str | None) -> IsServed:
        return partial(self._fleet.settles, tenant=tenant)

    def _shown(self, alias: Alias) -> dict[str, Any]:
        canary, is_served = alias.running, self._is_served(alias.tenant)
        return {
            "name": alias.name,
            "tenant": alias.tenant,
            "model": alias.model,
            "is_served": is_served(alias.model),
            "is_hidden": self._is_hidden(alias.tenant)(alias.name),
            "canary": None if canary is None else {"model": canary.model, "percent": canary.percent},
        }

    def _shown_canary(self, alias: Alias, canary: Canary) -> dict[str, Any]:
        arms = self._store.counts(canary.id)
        verdict = canary.reason
        if canary.state == "running":
            is_served = has_workers(self._fleet, canary.model, alias.tenant)
            verdict = verdict_so_far(arms, canary.rules) if is_served else "gets no requests: no worker serves it"
        return {
            "alias": alias.name,
            "tenant": alias.tenant,
            "state": canary.state,
            "verdict": verdict,
            "percent": canary.percent,
            "started": canary.started,
            "ended": canary.ended,
            "rules": msgspec.to_builtins(canary.rules),
            "arms": [
                _shown_arm("stable", canary.baseline, arms.stable),
                _shown_arm("canary", canary.model, arms.canary),
            ],
        }


def _shown_arm(arm: str, model: str, counts: ArmCounts) -> dict[str, Any]:
    return {
        "arm": arm,
        "model": model,
        "requests": counts.requests,
        "errors": counts.errors,
        "ttft_p50_s": counts.ttft.quantile(0.5),
        "ttft_p99_s": counts.ttft.quantile(0.99),
        "itl_p50_s": counts.itl.quantile(0.5),
        "itl_p99_s": counts.itl.quantile(0.99),
        "logprobs": counts.num_logprobs,
        "mean_logprob": counts.logprob / counts.num_logprobs if counts.num_logprobs else None,
    }
