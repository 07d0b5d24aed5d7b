"""Accepts connections of listening sockets while there are places for them; the others wait in the kernel.

An event loop's own server accepts whatever waits, and closes what there is no file descriptor for. A burst beyond the
limit of connections would lose its connections without an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

from shared.background_tasks import BackgroundTasks
from shared.log_limit import LogLimit

# Connections that are accepted in one turn of the event loop, which has others to serve.
BATCH = 32
# How long none is accepted after there was no place, or no file descriptor, for one.
FULL_PAUSE_S = 0.05

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_logger = logging.getLogger(__name__)


class Acceptor:
    """Makes connections of what waits at listening sockets. Owns those whose handshake is not done."""

    def __init__(
        self, protocol: Callable[[], asyncio.BaseProtocol], num_places: Callable[[], int], handshake: dict[str, Any]
    ) -> None:
        """Prepare.

        Args:
            protocol: Makes the protocol of one connection.
            num_places: How many connections may be made now; those whose handshake is not done are not counted.
            handshake: How to speak TLS; empty for clear text.
        """
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._num_places = num_places
        self._handshake = handshake
        self._joining = BackgroundTasks()
        self._log_limit = LogLimit(_logger)

    async def accept_forever(self, listener: socket.socket) -> None:
        """Accept what comes to a listening socket as soon as it comes."""
        listener.setblocking(False)
        readable = asyncio.Event()

        def wake() -> None:
            # It would be called in every turn until what waits is accepted.
            self._loop.remove_reader(listener)
            readable.set()

        try:
            while True:
                readable.clear()
                self._loop.add_reader(listener, wake)
                await readable.wait()
                if not await self.accept_waiting(listener):
                    await asyncio.sleep(FULL_PAUSE_S)
        finally:
            self._loop.remove_reader(listener)

    async def accept_waiting(self, listener: socket.socket) -> bool:
        """Accept what waits at a listening socket that does not block; return False if more waits than can be kept."""
        while num_wanted := min(BATCH, self._num_places()):
            accepted, error = _accept(listener, num_wanted)
            # Tasks of their own: a drain that ends the accepting loses none of them.
            joining = [self._joining.spawn(self._join(each)) for each in accepted]
            if joining and not self._handshake:
                await asyncio.wait(joining)
            else:
                await asyncio.sleep(0)
            if error is not None and error.errno in _EXHAUSTED:
                text = "clients wait, because no more files can be opened: raise the limit of open files (ulimit -n)"
                self._log_limit.warning("", text)
                return False
            if error is not None:
                return True
        return False

    async def _join(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a handshake that failed, or a client that is gone
            await self._loop.connect_accepted_socket(self._protocol, accepted, **self._handshake)


def _accept(listener: socket.socket, num_wanted: int) -> tuple[list[socket.socket], OSError | None]:
    """Return connections that wait, and why they are fewer than wanted: none waits, or there is no room for one."""
    accepted: list[socket.socket] = []
    while len(accepted) < num_wanted:
        try:
            accepted.append(listener.accept()[0])
        except OSError as error:
            return accepted, error
    return accepted, None
