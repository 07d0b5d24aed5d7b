"""vLLM's `/v1/load_lora_adapter` and its counterpart at the operator's port: all workers of a model are asked."""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from shared.adapter_calls import AdapterName, AdapterOrder, AdapterReply
from shared.features import ADAPTERS
from shared.messages import UNDECODABLE, Heartbeat, encode
from shared.subjects import adapter_subject

Body = TypeVar("Body", bound=Struct)

TIMEOUT_S = 120.0
"""For a worker to read an adapter of some gigabytes."""


class LoadBody(Struct, forbid_unknown_fields=True):
    """Load an adapter, or other content under its name.

    Attributes:
        lora_path: A directory on the hosts of the workers.
        base_model_name: The model; it may be left out where there is only one.
        load_inplace: Read and ignored: a name that is loaded again means the new content.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadBody(Struct, forbid_unknown_fields=True):
    """Unload an adapter."""

    lora_name: AdapterName
    base_model_name: str | None = None
    lora_int_id: int | None = None


class AdapterOrders:
    """Asks workers."""

    def __init__(self, nats: Client, fleet: Fleet) -> None:
        self._nats = nats
        self._fleet = fleet

    async def load(self, content: bytes) -> str:
        """Load an adapter on all workers of its model; return what was done.

        Raises:
            ApiError: The body is malformed, or a worker could not; those that could have it then.
        """
        body = _decoded(content, LoadBody)
        workers = self._workers(body.base_model_name)
        if any(body.lora_name == beat.model for beat in self._fleet.workers()):
            raise ApiError(400, f"lora_name: {body.lora_name!r} is the name of a model.", param="lora_name")
        await self._order(workers, AdapterOrder(body.lora_name, body.lora_path))
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def unload(self, content: bytes) -> str:
        """Unload an adapter on all workers of its model; return what was done.

        Raises:
            ApiError: As `load`.
        """
        body = _decoded(content, UnloadBody)
        await self._order(self._workers(body.base_model_name), AdapterOrder(body.lora_name))
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _workers(self, model: str | None) -> list[Heartbeat]:
        beats = self._fleet.workers()
        models = sorted({beat.model for beat in beats})
        if model is None and len(models) > 1:
            raise ApiError(400, f"base_model_name: name one of {', '.join(models)[:200]}.", param="base_model_name")
        found = [beat for beat in beats if model in (None, beat.model)]
        if not found:
            raise ApiError(404, "base_model_name: no worker serves this model.", param="base_model_name")
        if any(ADAPTERS not in beat.features for beat in found):
            raise ApiError(503, "Not all workers of the model know adapters: they are being updated.", code="no_worker")
        return found

    async def _order(self, workers: list[Heartbeat], order: AdapterOrder) -> None:
        errors = await asyncio.gather(*(self._ask(beat.worker, order) for beat in workers))
        problems = [f"{beat.worker}: {error}" for beat, error in zip(workers, errors, strict=True) if error is not None]
        if problems:
            message = f"{len(problems)} of {len(workers)} workers could not do it. {problems[0]}"
            raise ApiError(400, message[:2000], param="lora_name", code="adapter_refused")

    async def _ask(self, worker: str, order: AdapterOrder) -> str | None:
        """Return why a worker could not; None when it could."""
        try:
            reply = await self._nats.request(adapter_subject(worker), encode(order), timeout=TIMEOUT_S)
            return msgspec.msgpack.decode(reply.data, type=AdapterReply).error
        except UNDECODABLE as error:
            return f"its answer cannot be read: {error}"
        except (NatsError, TimeoutError) as error:
            return f"it does not answer ({type(error).__name__})"


def _decoded(content: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNDECODABLE as error:
        raise ApiError(400, f"The body cannot be read: {error}") from None
