"""A host with a network of its own, whose cable can be pulled out: a namespace behind a bridge."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest


class Cable:
    """The connection of this host to another one.

    Attributes:
        interface: Of this host.
        address: Of this host, for the other one.
    """

    def __init__(self, other: int) -> None:
        """Connect the network namespace of a process."""
        self._other = other
        self.interface, self._plug = f"hrb{other}", f"hrp{other}"
        # Of the networks that are for tests of devices, one a process.
        high, low = divmod(other * 4 % (1 << 17), 1 << 8)
        self.address, there = (f"198.{18 + high // 256}.{high % 256}.{low + number}" for number in (1, 2))
        _ip("link", "add", "name", self.interface, "type", "bridge")
        _ip("address", "add", f"{self.address}/30", "dev", self.interface)
        _ip("link", "set", self.interface, "up")
        _ip("link", "add", "name", self._plug, "type", "veth", "peer", "name", "eth0", "netns", str(other))
        _ip("link", "set", self._plug, "master", self.interface, "up")
        for change in (("address", "add", f"{there}/30", "dev", "eth0"), ("link", "set", "eth0", "up")):
            subprocess.run(self.there("ip", *change), check=True)
        subprocess.run(self.there("ip", "link", "set", "lo", "up"), check=True)

    def there(self, *command: str) -> Sequence[str]:
        """Return what runs a command on the other host; it has the process id that the command is started with."""
        return ("nsenter", "--target", str(self._other), "--net", *command)

    def pull(self) -> None:
        """Drop all packets from now on; neither host sees its link go down."""
        _ip("link", "set", self._plug, "down")

    def plug_in(self) -> None:
        """Let everything through again."""
        _ip("link", "set", self._plug, "up")

    def drop(self, *, is_dropping: bool) -> None:
        """Drop all packets for the other host, or none, from now on; neither host sees its link go down."""
        change = (
            ("replace", "dev", self._plug, "root", "blackhole") if is_dropping else ("del", "dev", self._plug, "root")
        )
        subprocess.run(("tc", "qdisc", *change), check=True)

    def remove(self) -> None:
        """Leave no interface behind."""
        for name in (self._plug, self.interface):
            subprocess.run(("ip", "link", "delete", name), check=False, capture_output=True)


@contextlib.contextmanager
def connected_host() -> Iterator[Cable]:
    """Make another host, where this machine lets us, and connect it."""
    if (reason := _obstacle()) is not None:
        pytest.skip(reason)
    other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        cable = Cable(_inside(other))
        try:
            yield cable
        finally:
            cable.remove()
    finally:
        other.kill()
        other.wait()


def _ip(*change: str) -> None:
    subprocess.run(("ip", *change), check=True)


def _inside(process: subprocess.Popen[bytes]) -> int:
    """Return the process id, once the process is in its namespace."""
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        assert process.poll() is None
    return process.pid


@functools.cache
def _obstacle() -> str | None:
    if any(shutil.which(tool) is None for tool in ("ip", "nsenter", "unshare")):
        return "ip, nsenter and unshare make networks"
    tried = subprocess.run(("ip", "link", "add", "name", f"hrt{os.getpid()}", "type", "bridge"), capture_output=True)
    if tried.returncode != 0:
        return f"this user may not make networks: {tried.stderr.decode().strip()}"
    _ip("link", "delete", f"hrt{os.getpid()}")
    return None
