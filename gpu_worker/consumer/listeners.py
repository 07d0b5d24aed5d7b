"""Which gateways listen again after NATS was away: frames to one that is not back yet would be lost.

NATS gives a message to those who are subscribed at that moment. After a restart everybody connects again within a
fraction of a second, in any order. So whoever is to get frames is asked first, with a frame that holds nothing: NATS
answers by itself when nobody is subscribed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from nats.aio.msg import Msg

from shared.background_tasks import BackgroundTasks
from shared.direct_client import DirectClient
from shared.messages import Frame, encode
from shared.nats_connection import SEND_ERRORS

_RETRY_S = 0.03
# By then, what a gateway misses is noticed and asked for again, if it is alive.
GIVE_UP_S = 2.0
_NO_RESPONDERS = "503"

_log = logging.getLogger(__name__)


class Listeners:
    """Knows which subjects nobody may be listening to yet. Owns an inbox for the answers of NATS.

    Attributes:
        on_found: Called when subjects have listeners again, or are waited for no longer.
    """

    def __init__(self, nats: DirectClient, worker: str) -> None:
        """Ask in the name of `worker`; `start` must be called once connected."""
        self._nats = nats
        self._question = encode(Frame(worker, 0, []))
        self._inbox = nats.new_inbox()
        self._is_away = False
        self._missing: set[str] = set()
        self._asked: dict[str, str] = {}
        self._absent: set[str] = set()
        self._rounds = itertools.count()
        self._round = -1
        self._tasks = BackgroundTasks()
        self.on_found: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen to what NATS answers."""
        await self._nats.subscribe_direct(f"{self._inbox}.*", self._receive)

    def has(self, subject: str) -> bool:
        """Whether a message would reach somebody, as far as can be known."""
        return not self._is_away and self._nats.is_connected and subject not in self._missing

    def disconnected(self) -> None:
        """Take note that NATS is away."""
        self._is_away = True
        self._round = next(self._rounds)

    def reconnected(self, subjects: Iterable[str]) -> None:
        """Find out which of these subjects have listeners, until all of them do."""
        self._is_away = False
        self._missing = set(subjects)
        self._round = next(self._rounds)
        self._tasks.spawn(self._seek(self._round), "search for listeners")

    async def _seek(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + GIVE_UP_S
        while self._missing and loop.time() < give_up_at:
            try:
                await self._ask()
            except SEND_ERRORS as error:
                # If the connection is lost again, this begins anew with the next one.
                _log.debug("listeners could not be asked for: %r", error)
                await asyncio.sleep(_RETRY_S)
                if number != self._round:
                    return
                continue
            if number != self._round:
                return
            self._missing = set(self._absent)
            self.on_found()
            if self._missing:
                await asyncio.sleep(_RETRY_S)
        if number == self._round:
            self._missing = set()
            self.on_found()

    async def _ask(self) -> None:
        self._absent = set()
        self._asked = {f"{self._inbox}.{index}": subject for index, subject in enumerate(sorted(self._missing))}
        for inbox, subject in self._asked.items():
            self._nats.send(subject, self._question, inbox)
        # NATS answers in order: what nobody listens to is known before the answer to this.
        await self._nats.flush()

    def _receive(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS and message.subject in self._asked:
            self._absent.add(self._asked[message.subject])
