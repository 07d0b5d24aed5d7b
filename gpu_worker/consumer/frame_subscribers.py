"""Finds the gateways that have subscribed again after NATS was away: frames to the others would be lost.

NATS delivers a message only to current subscribers. After a restart all processes reconnect within a fraction of a
second, in any order. So each gateway is first sent an empty frame as a request, which NATS itself answers with "no
responders" while there is no subscriber.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from shared.direct_client import DirectClient
from shared.messages import Frame, encode
from shared.nats_connection import SEND_ERRORS

_RETRY_S = 0.03
# A gateway that is alive has noticed by then which frames it misses.
GIVE_UP_S = 2.0
_NO_RESPONDERS = "503"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Search:
    """The search after one reconnect.

    Attributes:
        missing: Subjects that may have no subscriber yet.
        asked: Subject of each request of this round, by the inbox of its answer.
        absent: Subjects without a subscriber, as NATS has answered in this round.
    """

    missing: set[str]
    asked: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


class FrameSubscribers:
    """Knows which subjects may have no subscriber yet. Owns an inbox for the answers of NATS."""

    def __init__(self, nats: DirectClient, worker: str) -> None:
        self._nats = nats
        self._request = encode(Frame(worker, 0, []))
        self._inbox = nats.new_inbox()
        self._numbers = itertools.count()
        self._is_away = False
        self._search: _Search | None = None

    async def start(self) -> None:
        """Subscribe to the answers of NATS."""
        await self._nats.subscribe_direct(f"{self._inbox}.*", self._receive)

    def has(self, subject: str) -> bool:
        """Whether a subject has a subscriber, as far as is known."""
        if self._is_away or not self._nats.is_connected:
            return False
        return self._search is None or subject not in self._search.missing

    def disconnected(self) -> None:
        """Take note that NATS is away."""
        self._is_away = True
        self._search = None

    def reconnected(self, subjects: Iterable[str]) -> AsyncIterator[None]:
        """Ask which of these subjects have subscribers, until all of them do.

        Yields:
            None, whenever some of them have subscribers again, or are waited for no longer.
        """
        self._is_away = False
        self._search = _Search(set(subjects))
        return self._seek(self._search)

    async def _seek(self, search: _Search) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + GIVE_UP_S
        while search.missing and (left_s := give_up_at - loop.time()) > 0:
            try:
                await self._ask(search, left_s)
            except SEND_ERRORS as error:
                # If the connection is lost again, the search begins anew with the next one.
                _log.debug("subscribers could not be asked for: %r", error)
            else:
                if search is not self._search:
                    return
                has_found = len(search.absent) < len(search.missing)
                search.missing = set(search.absent)
                if has_found:
                    yield
            if search.missing:
                await asyncio.sleep(_RETRY_S)
            if search is not self._search:
                return
        if search is self._search:
            self._search = None
            yield

    async def _ask(self, search: _Search, timeout_s: float) -> None:
        search.absent = set()
        # Each request has an inbox of its own: an answer to an earlier round may come late.
        search.asked = {f"{self._inbox}.{next(self._numbers)}": subject for subject in sorted(search.missing)}
        for inbox, subject in search.asked.items():
            self._nats.send(subject, self._request, inbox)
        # NATS answers in order: after this, each subject without a subscriber is known.
        await self._nats.flush(timeout_s)

    def _receive(self, message: Msg) -> None:
        search = self._search
        if search is None or message.subject not in search.asked:
            return
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            search.absent.add(search.asked[message.subject])
