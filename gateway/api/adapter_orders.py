"""The operator's calls about adapters: vLLM's `/v1/load_lora_adapter` and its counterpart, and the list of all.

Content goes into the store once, one worker of the model checks it, and then the name is changed in NATS. The call
returns when all gateways have told that they have read it: every request that comes after that gets the new content.
Contents that no name means any more leave the store. Every gateway sweeps; it makes no difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.admission.shedding import UNKNOWN_RETRY_S
from gateway.api.schemas.checks import ModelName
from gateway.api.schemas.decoding import decode_typed
from gateway.dispatch.dispatcher import HEARTBEAT_INTERVAL_S, Dispatcher
from gateway.errors import ApiError
from gateway.fleet.adapter_names import LEASE_S, REVIEW_S, AdapterNameFollower
from gateway.fleet.fleet import Fleet
from shared.adapter_calls import ADAPTER_UNAVAILABLE, AdapterName, AdapterOrder, AdapterReply, is_digest, is_resident
from shared.adapter_files import AdapterContent, AdapterFilesError
from shared.adapter_names import AdapterNames, NamedAdapter
from shared.adapter_store import AdapterStore, AdapterStoreError
from shared.bounds import Counter, TenantName
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.errors import InvalidNameError
from shared.features import ADAPTER_STORE
from shared.messages import UNDECODABLE, Heartbeat, encode
from shared.nats_connection import SEND_ERRORS
from shared.objects.open import store_of
from shared.subjects import adapter_name_subject, adapter_subject, check_model_name
from shared.task_supervisor import TaskSupervisor

TIMEOUT_S = 120.0
"""For a worker to read an adapter of some gigabytes."""
_LOOK_S = 0.02
SWEEP_INTERVAL_S = 3600.0
_STORE_ERRORS: tuple[type[Exception], ...] = (AdapterStoreError, *SEND_ERRORS)

_logger = logging.getLogger(__name__)


class LoadBody(Struct, forbid_unknown_fields=True):
    """Add an adapter, or other content under its name.

    Attributes:
        lora_path: A directory on the host of the gateway.
        lora_content: Content that the store already has, instead of `lora_path`.
        base_model_name: The model; it may be left out where there is only one.
        load_inplace: Read and ignored: a name that is loaded again means the new content.
        tenant: Owner of the name; None for all tenants.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]+\Z")] | None = None
    lora_content: AdapterContent | None = None
    base_model_name: ModelName | None = None
    load_inplace: bool = False
    tenant: TenantName | None = None


class UnloadBody(Struct, forbid_unknown_fields=True):
    """Remove the name of an adapter."""

    lora_name: AdapterName
    base_model_name: ModelName | None = None
    lora_int_id: Counter | None = None
    tenant: TenantName | None = None


class ShownAdapter(Struct):
    """An adapter as operators see it.

    Attributes:
        tenant: Whose name it is; None is everybody's.
        rank, bytes: None of what only workers have named, in their `--lora-modules`.
        workers: Those that have it in memory.
    """

    name: str
    tenant: str | None
    base: str
    rank: int | None
    bytes: int | None
    digest: str
    workers: list[str]


class AdapterList(Struct):
    """All adapters."""

    adapters: list[ShownAdapter]


class AdapterOrders:
    """Adds and removes names. Without a store none is added; `read_names` has this gateway read what has changed."""

    def __init__(
        self, nats: Client, fleet: Fleet, store: AdapterStore | None, read_names: Callable[[], Awaitable[None]]
    ) -> None:
        self._nats = nats
        self._names = AdapterNames(nats.jetstream())
        self._fleet = fleet
        self._store = store
        self._read_names = read_names

    def shown(self) -> list[ShownAdapter]:
        """Return all adapters, in the order of their names."""
        fleet, beats = self._fleet, self._fleet.workers()
        named = fleet.named_adapters.all()
        known = {each.name for each in named if each.tenant is None}
        shown = [_shown(each, each.content, beats) for each in named if each.content is not None]
        for name in fleet.adapters().keys() - known:
            found = fleet.find_adapter(name)
            if found is not None and found.digest is not None:
                workers = _having(beats, found.model, found.digest)
                shown.append(ShownAdapter(name, None, found.model, None, None, found.digest, workers))
        return sorted(shown, key=lambda each: (each.name, each.tenant or ""))

    async def load(self, content: bytes) -> str:
        """Let a name mean an adapter, once one worker of its model has found that it can be served.

        Raises:
            ApiError: The body is malformed, or the adapter cannot be stored or served.
        """
        body = decode_typed(LoadBody, content)
        _check_name(body.lora_name, body.tenant)
        try:
            check_model_name(body.lora_name)
        except InvalidNameError as error:
            raise ApiError(400, f"lora_name: {error}", param="lora_name") from None
        workers = self._workers(body.base_model_name)
        if any(body.lora_name == beat.model for beat in self._fleet.workers()):
            raise ApiError(400, f"lora_name: {body.lora_name!r} is the name of a model.", param="lora_name")
        stored = await self._stored(body)
        await self._check(workers[0].worker, AdapterOrder(body.lora_name, digest=stored.digest))
        await self._put(body.lora_name, body.tenant, workers[0].model, stored)
        behind = await self._wait_for_gateways()
        await self._stored(body, stored)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully.{behind}"

    async def unload(self, content: bytes) -> str:
        """Let a name mean nothing; requests that have begun with it end with it.

        Raises:
            ApiError: The body is malformed, or there is no such name.
        """
        body = decode_typed(UnloadBody, content)
        _check_name(body.lora_name, body.tenant)
        if not await self._put(body.lora_name, body.tenant, body.base_model_name or "-", None):
            whose = "" if body.tenant is None else f" of the tenant {body.tenant!r}"
            message = f"lora_name: there is no adapter {body.lora_name!r}{whose}."
            raise ApiError(404, message, param="lora_name", code="adapter_not_found")
        behind = await self._wait_for_gateways()
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully.{behind}"

    def _workers(self, model: str | None) -> list[Heartbeat]:
        beats = self._fleet.workers()
        models = sorted({beat.model for beat in beats})
        if model is None and len(models) > 1:
            raise ApiError(400, f"base_model_name: name one of {', '.join(models)[:200]}.", param="base_model_name")
        found = [beat for beat in beats if model in (None, beat.model)]
        if not found:
            raise ApiError(404, "base_model_name: no worker serves this model.", param="base_model_name")
        if any(ADAPTER_STORE not in beat.features for beat in found):
            message = (
                "Not all workers of the model have places for adapters and a shared store: start them with --max-loras "
                "and --adapters."
            )
            raise ApiError(400, message, code="no_adapter_places")
        return sorted(found, key=lambda beat: beat.draining)

    async def _stored(self, body: LoadBody, known: AdapterContent | None = None) -> AdapterContent:
        """Return the stored content; store a known one again if it was deleted before its name protected it."""
        if (body.lora_path is None) == (body.lora_content is None):
            raise ApiError(400, "Give one of lora_path and lora_content.", param="lora_path")
        if self._store is None:
            raise ApiError(
                400, "The gateway has no store of adapters: start it with --adapters.", code="no_adapter_store"
            )
        try:
            if known is not None and await self._store.num_bytes(known.digest) is not None:
                return known
            if body.lora_path is not None:
                return await self._store.put(Path(body.lora_path))
            assert body.lora_content is not None
            digest = body.lora_content.digest
            num_bytes = await self._store.keep(digest)
            if num_bytes is None:
                message = f"lora_content: {self._store.place} does not have {digest[:12]}."
                raise ApiError(400, message, param="lora_content")
            return AdapterContent(digest, num_bytes, body.lora_content.rank)
        except AdapterFilesError as error:
            raise ApiError(400, f"lora_path: {error}.", param="lora_path", code="adapter_refused") from error
        except AdapterStoreError as error:
            raise ApiError(503, f"{error}.", code="adapter_unavailable", retry_after_s=UNKNOWN_RETRY_S) from error

    async def _check(self, worker: str, order: AdapterOrder) -> None:
        """Have a worker read an adapter; raise why it could not."""
        try:
            reply = await call_process(self._nats, adapter_subject(worker), encode(order), TIMEOUT_S)
            answer = msgspec.msgpack.decode(reply.data, type=AdapterReply)
        except UNDECODABLE as error:
            answer = AdapterReply(f"its answer cannot be read: {error}", is_fault=True)
        except (NatsError, TimeoutError) as error:
            answer = AdapterReply(f"it does not answer ({type(error).__name__})", is_fault=True)
        if answer.error is not None:
            message = f"The worker {worker} could not load it: {answer.error}"[:2000]
            if answer.is_fault:
                raise ApiError(503, message, code=ADAPTER_UNAVAILABLE, retry_after_s=UNKNOWN_RETRY_S)
            raise ApiError(400, message, param="lora_name", code="adapter_refused")

    async def _put(self, name: str, tenant: str | None, base: str, content: AdapterContent | None) -> bool:
        # Workers may have given the name, which an operator may take from all.
        is_known = tenant is None and name in self._fleet.adapters()
        try:
            is_change = await self._names.put(name, tenant, base, content, is_known=is_known)
            await self._read_names()
        except SEND_ERRORS as error:
            message = f"The names of adapters cannot be written ({error!r}): run `headrace setup`."
            raise ApiError(503, message, code="nats_unavailable", retry_after_s=UNKNOWN_RETRY_S) from error
        return is_change

    async def _wait_for_gateways(self) -> str:
        """Return when no live gateway uses earlier names than this one knows, and a sentence about those behind.

        A gateway that cannot read names uses none once its lease is over; those of earlier versions do not tell.
        """
        read, loop = self._fleet.named_adapters.read, asyncio.get_running_loop()
        started = loop.time()
        while read is not None and (behind := self._fleet.gateways_behind(read)):
            waited_s = loop.time() - started
            if waited_s > REVIEW_S + HEARTBEAT_INTERVAL_S and not any(behind.values()):
                return ""
            if waited_s > LEASE_S:
                names = ", ".join(sorted(behind)[:8])
                return f" Requests for adapters get a 503 from gateways that cannot read names: {names}."
            await asyncio.sleep(_LOOK_S)
        return ""


async def adapter_orders(
    stack: AsyncExitStack, store: str | None, nats: DirectClient, dispatcher: Dispatcher, tasks: TaskSupervisor
) -> AdapterOrders:
    """Return what carries out orders, with the store of the settings; the fleet knows names from now on."""
    fleet = dispatcher.fleet
    names = AdapterNameFollower(nats, fleet.named_adapters, dispatcher.send_heartbeat)
    stack.push_async_callback(tasks.stop, await names.start(tasks))
    if store is None:
        return AdapterOrders(nats, fleet, None, names.read)
    opened = AdapterStore(store_of(store, "HEADRACE_ADAPTERS"))
    stack.push_async_callback(opened.close)
    stack.push_async_callback(tasks.stop, tasks.start(sweep_forever(opened, fleet, names.read), "sweep of adapters"))
    return AdapterOrders(nats, fleet, opened, names.read)


async def sweep_forever(store: AdapterStore, fleet: Fleet, read_names: Callable[[], Awaitable[None]]) -> None:
    """Sweep every hour, first after an hour: by then all workers have reported their adapters."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        try:
            await sweep(store, fleet, read_names)
        except _STORE_ERRORS as error:
            _logger.warning("adapters without a name were not deleted: %r", error)


async def sweep(store: AdapterStore, fleet: Fleet, read_names: Callable[[], Awaitable[None]]) -> None:
    """Delete contents that have long meant nothing to operators and workers; `AdapterStoreError`, or NATS's errors."""

    async def read_named() -> set[str]:
        await read_names()
        named = fleet.named_adapters
        if named.read is None:
            raise AdapterStoreError("NATS has no names of adapters: run `headrace setup`")
        told = {beat.digest for heartbeat in fleet.workers() for beat in heartbeat.adapters}
        return told | {each.content.digest for each in named.all() if each.content is not None}

    for digest in await store.sweep(read_named):
        _logger.info("adapter %s: deleted from %s; no name has meant it for long", digest[:12], store.place)


def _shown(named: NamedAdapter, content: AdapterContent, beats: list[Heartbeat]) -> ShownAdapter:
    workers = _having(beats, named.base, content.digest)
    return ShownAdapter(named.name, named.tenant, named.base, content.rank, content.num_bytes, content.digest, workers)


def _having(beats: list[Heartbeat], model: str, digest: str) -> list[str]:
    return sorted(beat.worker for beat in beats if beat.model == model and is_resident(digest, beat.resident_adapters))


def _check_name(name: str, tenant: str | None) -> None:
    try:
        adapter_name_subject(tenant, name)
    except InvalidNameError as error:
        raise ApiError(400, f"lora_name: {error}", param="lora_name") from None
    if is_digest(name):
        raise ApiError(400, "lora_name: a name may not read as a digest does.", param="lora_name")
