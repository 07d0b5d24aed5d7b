"""A host of a group without rank 0: it connects to rank 0's host, and starts ranks on its orders."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from gpu_worker.execution.ranks import messages
from gpu_worker.execution.ranks.link import Link, LinkError, connect
from gpu_worker.execution.ranks.member import TICK_S
from gpu_worker.execution.ranks.process import LocalHost, RankProcess
from gpu_worker.execution.ranks.remote import COMING_S
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import DependencyError

_RETRY_S = 0.5
# A longer attempt would wait longer and longer for an answer, after the cable was plugged in too.
_ATTEMPT_S = 3.0
_BUSY_TICKS = 10

_log = logging.getLogger(__name__)


class Node:
    """One host.

    Attributes:
        is_connected: Rank 0 can reach it.
    """

    def __init__(self, config: RunnerConfig, log_level: str, log_format: str) -> None:
        self.is_connected = False
        self._config = config
        self._log_settings = (log_level, log_format)

    def serve(self, address: str, port: int, token: str, node: int) -> None:
        """Be host number `node` of the group whose rank 0 listens there, and of its successors.

        Raises:
            DependencyError: Rank 0 does not answer for two minutes, is not of this group, or says that it does not
                start.
        """
        where = f"rank 0 at {address}:{port}"
        while True:
            link = self._connect(address, port, token, node)
            _log.info("connected to %s as host %d", where, node)
            problem = self._follow(link)
            if problem is not None:
                raise DependencyError(f"{where}: the group does not start: {problem}")
            _log.warning("%s is gone; the ranks of this host have ended, and wait for another", where)

    def _connect(self, address: str, port: int, token: str, node: int) -> Link:
        deadline = time.monotonic() + COMING_S
        while True:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                return connect(address, port, token, node, min(_ATTEMPT_S, left_s))
            except (OSError, LinkError) as error:
                is_final = isinstance(error, LinkError) and error.is_final
                if is_final or time.monotonic() > deadline:
                    reason = str(error) if is_final else f"no answer within {COMING_S:g} s: {error}"
                    raise DependencyError(f"rank 0 at {address}:{port}: {reason}") from None
            time.sleep(_RETRY_S)

    def _follow(self, link: Link) -> str | None:
        """Do what rank 0 says until it is gone; return why the group does not start, where it says so."""
        level, form = self._log_settings
        host = LocalHost(
            self._config, is_shared=False, log_level=level, log_format=form, interface=interface_of(link.address)
        )

        def say(message: messages.FromNode) -> None:
            with contextlib.suppress(OSError):
                link.send(msgspec.msgpack.encode(message))

        stopped = threading.Event()
        pulse = threading.Thread(target=_beat, args=(host, link, stopped), name="pulse", daemon=True)
        pulse.start()
        self.is_connected = True
        try:
            while (message := link.receive(messages.TO_NODE)) is not None:
                if isinstance(message, messages.Goodbye):
                    return message.problem
                _do(message, host, say)
        except LinkError as error:
            _log.error("cut the connection to rank 0: %s", error)
        finally:
            self.is_connected = False
            stopped.set()
            link.close()
            for process in host.processes.values():
                process.close(0.0)
            pulse.join()
        return None


def _do(message: messages.ToNode, host: LocalHost, say: Callable[[messages.FromNode], None]) -> None:
    def hear(process: RankProcess, reply: messages.Reply | None) -> None:
        if process.epitaph is not None:
            say(messages.Ended(process.rank, process.pid, process.epitaph))
        elif reply is not None:
            say(messages.Said(process.rank, process.pid, reply))

    match message:
        case messages.StartRank(rank):
            process = host.start(rank, hear)
            say(messages.Started(rank, process.pid))
        case messages.KillRank(rank):
            host.processes[rank].kill()
        case messages.TellRank(None, content):
            host.tell(content)
        case messages.TellRank(int(rank), content):
            host.processes[rank].tell(content)
        case messages.EndEpoch():
            host.end()
        case messages.BeginEpoch():
            host.begin_again()


def _beat(host: LocalHost, link: Link, stopped: threading.Event) -> None:
    """Send heartbeats of the ranks to rank 0; kill the ranks once it is gone, even if one no longer reads messages."""
    woke, late_s = time.monotonic(), deque[float](maxlen=_BUSY_TICKS)
    while not stopped.wait(TICK_S):
        slept_s, woke = time.monotonic() - woke, time.monotonic()
        late_s.append(slept_s - TICK_S)
        processes = list(host.processes.values())
        beats = [messages.Beat(each.rank, *host.life(each.rank), each.is_starved) for each in processes]
        try:
            link.send(msgspec.msgpack.encode(messages.Pulse(beats, max(late_s) > TICK_S / 2)))
        except OSError:
            for process in processes:
                process.kill()
            return


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address; empty where the system does not tell."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""
