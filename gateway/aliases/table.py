"""The table of aliases: one value, changed as a whole. Functions return the changed table, or refuse the change."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.errors import ApiError, model_not_found
from shared.errors import InvalidNameError
from shared.subjects import check_model_name, check_name

MAX_ALIASES = 1000
MAX_RUNNING = 32
"""Canaries that run at once: each gateway reads what every other one counts of them, once a second."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Characters of a name shown in errors.
_SHOWN = 128

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Ratio = Annotated[float, Meta(ge=1.0, le=100.0)]
Percent = Annotated[float, Meta(gt=0.0, le=100.0)]
State = Literal["running", "rolled_back", "promoted"]


class Rules(Struct, frozen=True, kw_only=True):
    """When a canary is rolled back. `gateway.aliases.comparison` says by which tests.

    Attributes:
        min_requests: Requests of the canary before it is judged.
        max_error_rate: By how much the canary's share of failed answers may exceed the other arm's.
        max_ttft_ratio: How many times as long the canary's time to first token may be.
        max_itl_ratio: The same for the mean time between the tokens of an answer.
        max_logprob_drop: By how much the mean log probability of chosen tokens may be lower, in nats.
        logprob_share: Share of the requests whose log probabilities are asked for.
    """

    min_requests: Annotated[int, Meta(ge=20, le=1_000_000)] = 100
    max_error_rate: Share = 0.01
    max_ttft_ratio: Ratio = 1.5
    max_itl_ratio: Ratio = 1.5
    max_logprob_drop: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.2
    logprob_share: Share = 0.1


class Canary(Struct, frozen=True, kw_only=True):
    """A model that gets `percent` of an alias's requests; times are Unix seconds. `baseline` gets the others."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    model: Name
    baseline: Name
    percent: Percent
    started: float
    rules: Rules = Rules()
    state: State = "running"
    reason: Annotated[str, Meta(max_length=512)] = ""
    ended: float | None = None


class Alias(Struct, frozen=True, kw_only=True):
    """A name and its model, for one tenant or for all; `canary` is the one that runs, or the last one that ran."""

    name: Name
    model: Name
    tenant: Name | None = None
    canary: Canary | None = None

    @property
    def running(self) -> Canary | None:
        """The canary that runs."""
        return self.canary if self.canary is not None and self.canary.state == "running" else None

    @property
    def targets(self) -> set[str]:
        """The models that requests may go to."""
        return {self.model} if self.running is None else {self.model, self.running.model}


class AliasTable(Struct, frozen=True):
    """All aliases."""

    aliases: Annotated[tuple[Alias, ...], Meta(max_length=MAX_ALIASES)] = ()

    def find(self, name: str, tenant: str | None) -> Alias | None:
        """Return the alias of exactly this tenant, None for all tenants."""
        return next((each for each in self.aliases if each.name == name and each.tenant == tenant), None)


IsServed = Callable[[str], bool]
Change = Callable[[AliasTable], AliasTable]


def set_alias(
    table: AliasTable, name: str, model: str, tenant: str | None, is_served: IsServed, is_hidden: IsServed, now: float
) -> AliasTable:
    """Return the table with an alias for a model, in place of what the alias stood for. A canary of it ends `now`.

    What `is_hidden` finds goes before aliases; what `is_served` finds besides may be made up, and stops only new ones.

    Raises:
        ApiError: 400; the names are those of a model, of a chain, or too many. 404; the model is not served.
    """
    _check_names(check_name, name=name, model=model, tenant="-" if tenant is None else tenant)
    if _CONTROL.search(tenant or ""):
        raise _refusal("tenant", "'tenant' must not contain control characters.")
    is_new = table.find(name, tenant) is None and table.find(name, None) is None
    if is_hidden(name) or (is_new and is_served(name)):
        raise _refusal("name", f"{name[:_SHOWN]!r} is a served model or adapter: an alias must not hide it.")
    if is_new:
        _check_names(check_model_name, name=name)
    _check_target(table, model, is_served)
    if any(name in each.targets for each in table.aliases):
        raise _refusal("name", f"{name[:_SHOWN]!r} is what an alias stands for: aliases of aliases are not resolved.")
    others = tuple(each for each in table.aliases if (each.name, each.tenant) != (name, tenant))
    if len(others) >= MAX_ALIASES:
        raise _refusal("name", f"There are {MAX_ALIASES} aliases, and no more are kept: remove one first.")
    made = Alias(name=name, model=model, tenant=tenant, canary=_ended_by_set(table.find(name, tenant), model, now))
    return AliasTable(tuple(sorted((*others, made), key=lambda each: (each.name, each.tenant or ""))))


def _ended_by_set(alias: Alias | None, model: str, now: float) -> Canary | None:
    """Return the alias's last canary; one that runs ends, as the alias is set to its model or to another."""
    if alias is None or alias.running is None:
        return None if alias is None else alias.canary
    state: State = "promoted" if model == alias.running.model else "rolled_back"
    return msgspec.structs.replace(alias.running, state=state, reason=f"the alias was set to {model}", ended=now)


def remove_alias(table: AliasTable, name: str, tenant: str | None) -> AliasTable:
    """Return the table without an alias; `ApiError` 404 if there is none."""
    found = _found(table, name, tenant)
    return AliasTable(tuple(each for each in table.aliases if each is not found))


def start_canary(
    table: AliasTable,
    name: str,
    tenant: str | None,
    model: str,
    percent: float,
    rules: Rules,
    now: float,
    is_served: IsServed,
) -> AliasTable:
    """Return the table with a canary of an alias; `ApiError` 400 if it has one or is its model, 404 if unknown."""
    alias = _found(table, name, tenant)
    if alias.running is not None:
        raise _refusal("alias", f"The alias {name!r} has a canary already: promote it or roll it back first.")
    if sum(each.running is not None for each in table.aliases) >= MAX_RUNNING:
        raise _refusal("alias", f"{MAX_RUNNING} canaries run, and no more may at once: promote one or roll it back.")
    if model == alias.model:
        raise _refusal("model", f"The alias {name!r} stands for {model[:_SHOWN]!r} already.")
    _check_target(table, model, is_served)
    canary = Canary(
        id=secrets.token_hex(8), model=model, baseline=alias.model, percent=percent, started=now, rules=rules
    )
    return _replaced(table, alias, msgspec.structs.replace(alias, canary=canary))


def set_percent(table: AliasTable, name: str, tenant: str | None, percent: float) -> AliasTable:
    """Return the table with another share for a canary; as it grows, its clients stay with it. 404 without one."""
    alias, canary = _running(table, name, tenant)
    changed = msgspec.structs.replace(canary, percent=percent)
    return _replaced(table, alias, msgspec.structs.replace(alias, canary=changed))


def end_canary(
    table: AliasTable,
    name: str,
    tenant: str | None,
    state: State,
    reason: str,
    now: float,
    canary_id: str | None = None,
) -> AliasTable:
    """Return the table with a canary promoted or rolled back; `ApiError` 404 if there is no such canary.

    `reason` is for people, `now` is in Unix seconds; without `canary_id` the canary that runs is meant.
    """
    alias, canary = _running(table, name, tenant)
    if canary_id not in (None, canary.id):
        raise ApiError(404, f"This canary of the alias {name!r} has ended.", code="canary_not_found")
    ended = msgspec.structs.replace(canary, state=state, reason=reason, ended=now)
    model = canary.model if state == "promoted" else alias.model
    return _replaced(table, alias, msgspec.structs.replace(alias, canary=ended, model=model))


def _check_names(check: Callable[[str], object], **names: str) -> None:
    for field, name in names.items():
        if name in (".", ".."):
            raise _refusal(field, f"'{field}' must not be '.' or '..', which paths leave out.")
        try:
            check(name)
        except InvalidNameError as error:
            raise _refusal(field, f"'{field}' {error.problem}.") from None


def _check_target(table: AliasTable, model: str, is_served: IsServed) -> None:
    if any(each.name == model for each in table.aliases):
        raise _refusal("model", f"{model[:_SHOWN]!r} is an alias itself: name the model that it stands for.")
    if not is_served(model):
        raise ApiError(404, f"No worker serves the model `{model[:_SHOWN]}`.", param="model", code="model_not_found")


def no_such_model(name: str, model: str) -> ApiError:
    """Return the 404 of a name whose model, which is another if it is an alias, is not served."""
    if name == model:
        return model_not_found(model)
    message = f"The alias `{name[:_SHOWN]}` stands for the model `{model[:_SHOWN]}`, which no worker serves."
    return ApiError(404, message, param="model", code="model_not_found")


def _found(table: AliasTable, name: str, tenant: str | None) -> Alias:
    alias = table.find(name, tenant)
    if alias is None:
        whose = "" if tenant is None else f" of tenant {tenant[:_SHOWN]!r}"
        raise ApiError(404, f"There is no alias {name[:_SHOWN]!r}{whose}.", param="alias", code="alias_not_found")
    return alias


def _running(table: AliasTable, name: str, tenant: str | None) -> tuple[Alias, Canary]:
    alias = _found(table, name, tenant)
    if alias.running is None:
        raise ApiError(404, f"No canary of the alias {name!r} runs.", param="alias", code="canary_not_found")
    return alias, alias.running


def _replaced(table: AliasTable, alias: Alias, changed: Alias) -> AliasTable:
    return AliasTable(tuple(changed if each is alias else each for each in table.aliases))


def _refusal(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
