"""Taking requests back: cancellations to the workers, and deletion of unclaimed messages.

Cancellations made in the same loop iteration leave as one message per model and epoch; deletions run a few at a time.
Both are best effort: the epoch is the fence, and a worker drops requests past their deadline.
"""

from __future__ import annotations

import asyncio
import logging

from nats.aio.client import Client
from nats.js import JetStreamContext

from shared.background_tasks import BackgroundTasks
from shared.messages import Cancel, encode
from shared.nats_connection import SEND_ERRORS
from shared.streams import INTERACTIVE_STREAM
from shared.subjects import cancel_subject

MAX_DELETIONS = 16
MAX_IDS_PER_CANCEL = 1000
MAX_REMEMBERED = 10_000

_logger = logging.getLogger(__name__)


class Revoker:
    """Sends cancellations and deletions in the background."""

    def __init__(self, nats: Client, js: JetStreamContext) -> None:
        self._nats = nats
        self._js = js
        # By model, epoch, and the worker that is left alone.
        self._cancels: dict[tuple[str, int, str | None], list[str]] = {}
        self._deletions = asyncio.Semaphore(MAX_DELETIONS)
        self._tasks = BackgroundTasks()
        self._sending: asyncio.Task[None] | None = None
        self._model_of: dict[str, str] = {}

    def cancel(self, model: str, request_id: str, epoch: int, keep: str | None = None) -> None:
        """Tell the workers of a model, all but `keep`, to stop a request: attempts up to `epoch`.

        Later ones may be of a gateway that has taken the request over; workers remember stopped attempts for minutes.
        """
        if len(self._model_of) >= MAX_REMEMBERED:
            del self._model_of[next(iter(self._model_of))]
        self._model_of[request_id] = model
        self._cancels.setdefault((model, epoch, keep), []).append(request_id)
        if self._sending is None:
            self._sending = self._tasks.spawn(self.send_cancels())

    def cancel_again(self, request_id: str, epoch: int) -> None:
        """Stop attempts up to `epoch` of a request that has ended here; one that is unknown here is left alone."""
        model = self._model_of.get(request_id)
        if model is not None:
            self.cancel(model, request_id, epoch)

    def delete(self, stream_seq: int) -> None:
        """Delete a message from the interactive stream."""
        self._tasks.spawn(self._delete(stream_seq))

    async def send_cancels(self) -> None:
        """Send the cancellations collected so far."""
        self._sending = None
        cancels, self._cancels = self._cancels, {}
        for (model, epoch, keep), ids in cancels.items():
            for start in range(0, len(ids), MAX_IDS_PER_CANCEL):
                payload = encode(Cancel(tuple(ids[start : start + MAX_IDS_PER_CANCEL]), epoch, keep=keep))
                try:
                    await self._nats.publish(cancel_subject(model), payload)
                except SEND_ERRORS as error:
                    _logger.warning("%d requests could not be cancelled: %r", len(ids), error)

    async def close(self) -> None:
        """Wait for messages on their way."""
        await self._tasks.wait()

    async def _delete(self, stream_seq: int) -> None:
        async with self._deletions:
            try:
                await self._js.delete_msg(INTERACTIVE_STREAM, stream_seq)
            except SEND_ERRORS as error:
                # Usually claimed and acknowledged meanwhile, so that there is nothing to delete.
                _logger.debug("message %d was not deleted: %r", stream_seq, error)
