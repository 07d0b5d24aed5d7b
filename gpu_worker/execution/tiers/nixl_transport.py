"""Reads contents out of another worker's host memory by NIXL, where it is installed: RDMA on networks that have it.

The protocol is that of shared memory: the receiver asks over TCP, gets the places of contents with their headers, and
reads them there. Leased contents stay unchanged until the receiver says that it has all, and the header is verified
over the bytes that have arrived. The sender sends NIXL's description of the memory only after a lease was opened. It
allows reading all of the host tier until the worker ends, as shared memory does.

Source: github.com/ai-dynamo/nixl, `src/api/python/_api.py`, with the backend UCX.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import select
import socket
import threading
import time
import zlib
from collections.abc import Sequence as Values
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from gpu_worker.execution.tiers import peer_wire
from gpu_worker.execution.tiers.peer_wire import Found, Kind, PeerError, PlaceReceiver, PlaceSender, send_frame

_log = logging.getLogger(__name__)

MAX_DESCRIPTION_BYTES = 1 << 20
_RDMA_DEVICES = Path("/sys/class/infiniband")
_CHECKSUM = Struct("<I")
_NUM_ROWS = 16
"""Contents that are read at once, at most."""
_MAX_KNOWN = 256
_POLL_S = 0.0002
_WAIT_MS = 1


class NixlError(PeerError):
    """Another worker's memory cannot be read by NIXL."""


class NixlAgent:
    """The part of NIXL in this process. Any thread may call it.

    Attributes:
        description: Of this worker's memory, for others to read it; damage is found by its checksum.
    """

    def __init__(self, regions: Values[tuple[int, int]], row_bytes: int) -> None:
        """Let others read regions (address and bytes), and prepare to read contents of `row_bytes` at most."""
        # Only a process that uses it pays for it.
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        logging.getLogger("nixl").setLevel(logging.WARNING)
        # NIXL's own thread for progress takes some of a core while nothing is read, and wakes late on busy cores.
        config = nixl_agent_config(False, backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl_agent(secrets.token_hex(16), config)
        self._rows = np.zeros((_NUM_ROWS, row_bytes), dtype=np.uint8)
        own = [(self._rows.ctypes.data, self._rows.nbytes)]
        self._registered = [
            self._agent.register_memory([(*region, 0, "") for region in each], "DRAM") for each in (regions, own)
        ]
        shown = self._agent.get_partial_agent_metadata(self._registered[0], inc_conn_info=True, backends=["UCX"])
        self.description = _CHECKSUM.pack(zlib.crc32(shown)) + shown
        self._free = list(range(_NUM_ROWS))
        # Transfers that have ended, or were given up, and the rows that they write to.
        self._begun: list[tuple[Any, int]] = []
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.Condition()

    def connect(self, description: bytes) -> bytes:
        """Return the name of the worker whose memory is described; `NixlError` if it cannot be reached."""
        (checksum,) = _CHECKSUM.unpack_from(description.ljust(_CHECKSUM.size, b"\0"))
        shown = bytes(description[_CHECKSUM.size :])
        # NIXL ends the process at some that are damaged.
        if not shown or checksum != zlib.crc32(shown):
            raise NixlError("the description of its memory is damaged")
        with self._lock:
            if (known := self._known.get(shown)) is not None:
                return known
            while len(self._known) >= _MAX_KNOWN:
                self._forget(next(iter(self._known.values())))
        try:
            name: bytes = self._agent.add_remote_agent(shown)
        except Exception as error:
            raise NixlError(f"NIXL does not reach its memory: {error}") from None
        with self._lock:
            self._known[shown] = name
        return name

    def read(self, name: bytes, place: int, row: memoryview) -> None:
        """Read the bytes at an address of another worker's memory; `NixlError` if not possible in time."""
        until = time.monotonic() + peer_wire.FRAME_S
        with self._lock:
            if not self._lock.wait_for(self._has_row, peer_wire.FRAME_S):
                raise NixlError("NIXL has not ended earlier reads")
            number = self._free.pop()
        own = self._rows[number, : len(row)]
        handle = None
        try:
            here, there = (
                self._agent.get_xfer_descs([(address, own.nbytes, 0)], "DRAM") for address in (own.ctypes.data, place)
            )
            handle = self._agent.initialize_xfer("READ", here, there, name)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            state, why = "ERR", f"NIXL cannot read its memory: {error}"
        else:
            why = "NIXL is too slow" if state == "PROC" else "NIXL cannot read its memory"
        if state == "DONE":
            row[:] = own.data
        with self._lock:
            if handle is None:
                self._free.append(number)
            else:
                self._begun.append((handle, number))
            self._lock.notify()
        if state != "DONE":
            self._forget(name)
            raise NixlError(why)

    def _has_row(self) -> bool:
        """Return whether a row is free; those are whose transfer has ended, and that nothing is written to any more."""
        running = []
        for handle, number in self._begun:
            with suppress(Exception):
                # A transfer that has failed raises, and has ended too.
                if self._agent.check_xfer_state(handle) == "PROC":
                    running.append((handle, number))
                    continue
                handle.release()
            self._free.append(number)
        self._begun = running
        return bool(self._free)

    def progress(self) -> None:
        """Answer readers, as far as the network needs the process for that: to connect, and for all reads over TCP."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """End all access by readers."""
        for each in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)
        self._registered.clear()

    def _forget(self, name: bytes) -> None:
        """Reach a worker anew, should it be there again."""
        with self._lock:
            self._known = {shown: known for shown, known in self._known.items() if known != name}
        with suppress(Exception):
            self._agent.remove_remote_agent(name)


def make_agent(regions: Values[tuple[int, int]], row_bytes: int) -> NixlAgent | None:
    """Return the agent that reads other workers' memory; None where NIXL is not installed, does not run, or is slow.

    Without RDMA, UCX takes a multiple of the time of our own TCP, so the operator has to name its transports then.
    """
    if importlib.util.find_spec("nixl") is None:
        return None
    if "UCX_TLS" not in os.environ and not any(_RDMA_DEVICES.glob("*")):
        _log.info("NIXL is not used: this host has no RDMA device, and UCX_TLS is not set")
        return None
    try:
        agent = NixlAgent(regions, row_bytes)
    except Exception as error:
        _log.warning("NIXL is installed, and does not run (%s): KV goes between hosts over TCP", error)
        return None
    _log.info("KV goes by NIXL between hosts that both have it")
    return agent


class NixlSender(PlaceSender):
    """Sends the description of the memory, then the addresses of contents."""

    def __init__(self, connection: socket.socket, agent: NixlAgent) -> None:
        super().__init__(connection)
        self._agent = agent

    def begin(self) -> None:
        """Send the description of the memory."""
        send_frame(self._connection, Kind.NIXL, self._agent.description)

    def wait(self, timeout_s: float) -> None:
        """Let the receiver read until it sends a frame, or a time is over."""
        until = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while not poller.poll(_WAIT_MS) and time.monotonic() < until:
            self._agent.progress()

    def _place(self, found: Found) -> int:
        return int(np.frombuffer(found.payload, dtype=np.uint8).ctypes.data)


class NixlReceiver(PlaceReceiver):
    """Reads the sender's memory by NIXL."""

    way = "read in its memory, by NIXL"

    def __init__(self, connection: socket.socket, rows: Values[int], agent: NixlAgent, name: bytes) -> None:
        """Read from the worker `name`, to which the agent is connected."""
        super().__init__(connection, rows)
        self._agent = agent
        self._name = name

    def _read(self, place: int, row: memoryview) -> None:
        self._agent.read(self._name, place, row)
