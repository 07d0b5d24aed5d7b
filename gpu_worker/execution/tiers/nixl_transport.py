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
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Values
from contextlib import contextmanager, suppress
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
_PROGRESS_S = 0.001


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
        # By description, the worker that was used last at the end; and how many connections use each.
        self._known: dict[bytes, bytes] = {}
        self._users: Counter[bytes] = Counter()
        self._lock = threading.Condition()
        self._num_readers = 0
        self._is_closed = False
        self._readers = threading.Condition()
        threading.Thread(target=self._progress, name="kv-nixl", daemon=True).start()

    def connect(self, description: bytes) -> bytes:
        """Return the name of the worker whose memory is described, in use until `release`.

        `NixlError` if it cannot be reached.
        """
        (checksum,) = _CHECKSUM.unpack_from(description.ljust(_CHECKSUM.size, b"\0"))
        shown = bytes(description[_CHECKSUM.size :])
        # NIXL ends the process at some that are damaged.
        if not shown or checksum != zlib.crc32(shown):
            raise NixlError("the description of its memory is damaged")
        with self._lock:
            name = self._known.pop(shown, None) or self._add(shown)
            self._known[shown] = name
            self._users[name] += 1
        return name

    def release(self, name: bytes) -> None:
        """Take note that a connection does not use a worker's memory any more."""
        with self._lock:
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name]

    def _add(self, shown: bytes) -> bytes:
        while len(self._known) >= _MAX_KNOWN:
            unused = next((known for known in self._known.values() if known not in self._users), None)
            if unused is None:
                raise NixlError("the memory of too many workers is being read")
            self._forget(unused)
        try:
            name: bytes = self._agent.add_remote_agent(shown)
        except Exception as error:
            raise NixlError(f"NIXL does not reach its memory: {error}") from None
        if name in self._known.values():
            # One of both lies, and NIXL tells them apart by nothing else.
            self._forget(name)
            raise NixlError("it has the name of another worker")
        return name

    def read(self, name: bytes, place: int, row: memoryview) -> None:
        """Read the bytes at an address of another worker's memory; `NixlError` if not possible in time."""
        until = time.monotonic() + peer_wire.FRAME_S
        with self._lock:
            if not self._lock.wait_for(self._has_row, peer_wire.FRAME_S):
                raise NixlError("NIXL has not ended earlier reads")
            number = self._free.pop()
        own = self._rows[number, : len(row)]
        handle, state, why = None, "ERR", "NIXL cannot read its memory"
        try:
            here, there = (
                self._agent.get_xfer_descs([(address, own.nbytes, 0)], "DRAM") for address in (own.ctypes.data, place)
            )
            handle = self._agent.initialize_xfer("READ", here, there, name)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                row[:] = own.data
        except Exception as error:
            state, why = "ERR", f"NIXL cannot read its memory: {error}"
        finally:
            with self._lock:
                if handle is None:
                    self._free.append(number)
                else:
                    self._begun.append((handle, number))
                self._lock.notify()
        if state != "DONE":
            self._forget(name)
            raise NixlError("NIXL is too slow" if state == "PROC" else why)

    def _has_row(self) -> bool:
        """Return whether a row is free; those are whose transfer has ended, and that nothing is written to any more."""
        running = []
        for handle, number in self._begun:
            # A transfer that has failed raises, and has ended too.
            with suppress(Exception):
                if self._agent.check_xfer_state(handle) == "PROC":
                    running.append((handle, number))
                    continue
            with suppress(Exception):
                handle.release()
            self._free.append(number)
        self._begun = running
        return bool(self._free)

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Answer readers meanwhile: to connect, and for all reads over TCP, the network needs the process for that."""
        with self._readers:
            self._num_readers += 1
            self._readers.notify()
        try:
            yield
        finally:
            with self._readers:
                self._num_readers -= 1

    def _progress(self) -> None:
        """Do for all readers together what one needs: a thread for each would wake a thousand times a second, too."""
        while True:
            with self._readers:
                self._readers.wait_for(lambda: self._num_readers or self._is_closed)
                if self._is_closed:
                    return
            with suppress(Exception):
                self._agent.get_new_notifs()
            time.sleep(_PROGRESS_S)

    def close(self) -> None:
        """End all access by readers."""
        with self._readers:
            self._is_closed = True
            self._readers.notify()
        for each in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(each)
        self._registered.clear()

    def _forget(self, name: bytes) -> None:
        """Reach a worker anew, should it be there again."""
        with self._lock:
            self._known = {shown: known for shown, known in self._known.items() if known != name}
            # Locked: once it is added anew, it would be removed again.
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
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        with self._agent.being_read():
            poller.poll(1000 * max(0.0, timeout_s))

    def _place(self, found: Found) -> int:
        return int(np.frombuffer(found.payload, dtype=np.uint8).ctypes.data)


class NixlReceiver(PlaceReceiver):
    """Reads the sender's memory by NIXL."""

    way = "read in its memory, by NIXL"
    _is_closed = False

    def __init__(self, connection: socket.socket, rows: Values[int], agent: NixlAgent, name: bytes) -> None:
        """Read from the worker `name`, to which the agent is connected."""
        super().__init__(connection, rows)
        self._agent = agent
        self._name = name

    def _read(self, place: int, row: memoryview) -> None:
        self._agent.read(self._name, place, row)

    def close(self) -> None:
        """Let go of the sender's memory, once."""
        if not self._is_closed:
            self._is_closed = True
            self._agent.release(self._name)
