"""Makes the jobs of one batch's lines.

A line to publish needs its model, which says how it writes, and a check of its grammar. A line whose results are only
read back, or whose jobs end, needs neither: its results say how they are read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway.admission.caller import Caller
from gateway.api.model_fit import with_adapter
from gateway.batches.driver_services import DriverServices
from gateway.batches.input_lines import InputLine, line_fields
from gateway.batches.line import (
    BatchLine,
    fitted,
    line_of,
    parsed_line,
    shortened,
    with_checked_grammar,
    with_images,
    with_model_reading,
)
from gateway.batches.record import BatchRecord
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.responses.truncation import TokenCounter
from shared.errors import BadRequestError
from shared.media_store import LINE_TTL_S

# Wait for the checks of other lines. Usual ones take 10 ms.
_TURN_S = 2.0
INLINE_BYTES = 4 << 10
"""Larger lines and results are read in a thread: 60 kB take up to 100 ms."""
# Lines of more sequences are made in a thread: one of 2,048 texts takes 20 ms.
_INLINE_SEQUENCES = 64

Result = TypeVar("Result")


class NotReadyError(Exception):
    """A line cannot be published now.

    Attributes:
        reason: What it waits for; lines with the same reason are ready at about the same time.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LineMaker:
    """Makes lines of jobs. All its methods raise `BadRequestError` for a line that is refused."""

    def __init__(self, services: DriverServices, record: BatchRecord) -> None:
        self._services = services
        self._record = record
        self._tenant = record.tenant
        # The tenant's live requests need the other places in which its grammars wait.
        self._one_check = asyncio.Lock()

    async def line_to_read(self, place: InputLine, prefix: str) -> BatchLine:
        """Return a line whose results are to be read, without what only its worker needs."""
        custom_id, generation = await self._parsed(place)
        generation = self._services.settled(generation, self._tenant)
        # While its adapter's workers are away, none computes its jobs, and results are found by the jobs' ids.
        with contextlib.suppress(ApiError):
            generation = with_adapter(generation, self._services.fleet, self._tenant)
        return await self._line_of(custom_id, generation, prefix)

    async def line_to_publish(self, place: InputLine, prefix: str) -> BatchLine:
        """Return a line as its model computes it; `NotReadyError` if it cannot be published now."""
        services, record = self._services, self._record
        custom_id, generation = await self._parsed(place)
        generation = fitted(generation, services.watermark_of(record.tenant, record.key), self._settled)
        generation = await self._as_its_model(generation)
        line = await self._line_of(custom_id, generation, prefix)
        try:
            return await with_images(line, services.images, self._tenant)
        except ApiError as error:
            if error.status != 400:
                raise NotReadyError("images", error.message) from error
            raise BadRequestError(error.message, f"body.{error.param}", error.code or "invalid_value") from None

    async def _parsed(self, place: InputLine) -> tuple[str, Generation]:
        def read() -> tuple[str, Generation]:
            return parsed_line(line_fields(place, self._services.max_line_bytes))

        return await self._beside_streams(place.end - place.start > INLINE_BYTES, read)

    async def _beside_streams(self, is_large: bool, work: Callable[[], Result]) -> Result:
        """Do work, in a thread if it is large: many lines are made at the same time, and streams go on meanwhile."""
        return await self._services.bodies.in_thread(self._tenant, work) if is_large else work()

    async def _line_of(self, custom_id: str, generation: Generation, prefix: str) -> BatchLine:
        record, now = self._record, self._services.clock.now()
        caller = Caller(record.key, record.tenant, (), b"", custom_id[:256], weight=record.weight)
        make = partial(line_of, custom_id, generation, caller, prefix, deadline=record.expires_at, now=now)
        return await self._beside_streams(generation.num_sequences > _INLINE_SEQUENCES, make)

    async def _as_its_model(self, generation: Generation) -> Generation:
        services, model = self._services, generation.served_model
        load = services.fleet.load(model)
        counter = TokenCounter(services.tokenizer, services.images, self._tenant, LINE_TTL_S)
        try:
            generation = await shortened(generation, load, counter)
        except ApiError as error:
            self._wake(model)
            raise NotReadyError(f"tokens of {model}", error.message) from error
        generation = await with_model_reading(generation, load, services.bodies, self._tenant)
        if generation.tools is not None and generation.tools.tools and generation.reading is None:
            message = f"No worker has said how `{generation.model}` writes calls of tools."
            self._wake(model)
            raise NotReadyError(f"model {model}", message)
        return generation if generation.sampling.grammar is None else await self._checked(generation)

    def _wake(self, model: str) -> None:
        """Have a model loaded that sleeps: nothing waits in its queue before it can say how it reads the line."""
        if self._services.fleet.coming(model) is not None:
            self._services.wake(model)

    async def _checked(self, generation: Generation) -> Generation:
        try:
            async with asyncio.timeout(_TURN_S):
                await self._one_check.acquire()
        except TimeoutError:
            raise NotReadyError("grammars", "The grammars of other lines are checked before.") from None
        try:
            return await with_checked_grammar(generation, self._services.grammars, self._tenant)
        except ApiError as error:
            raise NotReadyError("grammars", error.message) from error
        finally:
            self._one_check.release()

    def _settled(self, generation: Generation) -> Generation:
        generation, fleet = self._services.settled(generation, self._tenant), self._services.fleet
        name = generation.model
        found = fleet.find_adapter(name, self._tenant)
        if found is None and fleet.named_adapters.was_removed(name, self._tenant) and name not in fleet.models():
            raise BadRequestError(f"The adapter {name[:128]!r} was removed.", "body.model", "model_not_found")
        try:
            return with_adapter(generation, fleet, self._tenant)
        except ApiError as error:
            # Its workers are away or being updated.
            raise NotReadyError(f"model {name}", error.message) from error
