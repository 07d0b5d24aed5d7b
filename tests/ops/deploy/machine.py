"""Containers without a container engine: processes in Linux namespaces, with files and addresses of their own.

A machine is a network of its own, with a bridge. A container in it has its own address and loopback, knows the others
by name, sees its mounts at the paths that its configuration names, and has no environment but the one that it was
given. Commands therefore run exactly as they are written, and no port of this computer is taken. What differs from an
engine: files outside the mounts are this computer's, and everybody is root of the namespace.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.architecture.source import ROOT
from tests.servers import find_binary
from tests.waiting import wait_for

# Gives a container its network: $1 its name, $2 its address.
_NETWORK = """
set -e
ip netns add "$1"
ip link add name "v-$1" type veth peer name eth0 netns "$1"
ip link set "v-$1" master bridge up
ip -n "$1" address add "$2/24" dev eth0
ip -n "$1" link set eth0 up
ip -n "$1" link set lo up
"""

# Gives a command a container's files: $1 the folder for its root, $2 a file with `SOURCE TARGET` lines, $3 `ro` where
# nothing but the targets may be written; the command.
# In folders of this computer in which something is mounted, all else is linked.
_FILES = """
set -e
root=$1 mounts=$2 mode=$3; shift 3
mount -t tmpfs tmpfs "$root"
mkdir "$root/.host"
mount --rbind / "$root/.host"
tops=$(cut -d" " -f2 "$mounts" | cut -d/ -f2 | sort -u)
for top in /*; do
  case " $(echo $tops) " in *" ${top#/} "*)
    mkdir "$root$top"
    for entry in "$top"/*; do [ ! -e "$entry" ] || ln -s "/.host$entry" "$root$entry"; done ;;
  *)
    if [ -h "$top" ]; then cp -P "$top" "$root$top"
    elif [ -d "$top" ]; then mkdir "$root$top"; mount --rbind "$top" "$root$top"; fi ;;
  esac
done
open_ancestors() {
  case $1 in /) return;; esac
  open_ancestors "$(dirname "$1")"
  if [ -h "$root$1" ]; then
    rm "$root$1"; mkdir "$root$1"
    for entry in "$1"/*; do [ ! -e "$entry" ] || ln -s "/.host$entry" "$root$entry"; done
  fi
}
while read -r source target; do
  open_ancestors "$(dirname "$target")"
  [ ! -h "$root$target" ] || rm "$root$target"
  if [ -d "$source" ]; then mkdir -p "$root$target"; else mkdir -p "$(dirname "$root$target")"; touch "$root$target"; fi
  mount --rbind "$source" "$root$target"
done <"$mounts"
if [ "$mode" = ro ]; then
  # Flags of mounts that this namespace was given may not be taken away.
  while read -r _ _ _ _ place flags _; do
    inside=${place#"$root"}
    [ "$inside" != "$place" ] || continue
    case ${inside#/.host} in /dev*|/proc*|/sys*) continue;; esac
    cut -d" " -f2 "$mounts" | grep -qxF "$inside" && continue
    # A mount of this folder within itself is not there any more.
    mount -o "remount,bind,ro,${flags#r[ow],}" "$place" 2>/dev/null || :
  done </proc/self/mountinfo
fi
exec chroot "$root" "$@"
"""


def can_make_machines() -> bool:
    """Whether this computer lets us make namespaces with a network between them."""
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip", "curl")):
        return False
    links = "ip link add name br0 type bridge && ip link add name veth0 type veth peer name veth1"
    probe = f"mount -t tmpfs t /run && ip netns add a && {links}"
    return subprocess.run([*_UNSHARE, "sh", "-c", probe], capture_output=True).returncode == 0


_UNSHARE = ("unshare", "-Urmnpf", "--mount-proc", "--kill-child")


@dataclass
class Container:
    """What runs in a container, and where.

    Attributes:
        mounts: Files and folders of this computer by the paths at which the container sees them.
        is_read_only: Nothing but these can be written.
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    mounts: Mapping[str, Path]
    log: Path
    is_read_only: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Machine:
    """A network of containers; leaving its block ends all that runs in it.

    Attributes:
        programs: Folder of the programs that images bring.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """Make the network with an address for each of these names; nothing runs yet."""
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._addresses = {name: f"10.7.0.{10 + index}" for index, name in enumerate(names)}
        self._init = subprocess.Popen([*_UNSHARE, "sleep", "infinity"])
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        self._hosts = directory / "hosts"
        self._hosts.write_text("\n".join(hosts) + "\n")
        self.programs = _programs(directory / "programs")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        self._pid = wait_for(lambda: children.read_text().split(), 5)[0]
        setup = "ip link add name bridge type bridge && ip address add 10.7.0.1/24 dev bridge && ip link set bridge up"
        self._enter("sh", "-c", f"mount -t tmpfs t /run && ip link set lo up && {setup}")
        for name, address in self._addresses.items():
            self._enter("sh", "-c", _NETWORK, "sh", name, address)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._init.kill()
        self._init.wait()
        for process in self._started:
            process.wait(10)

    def start(self, container: Container, given: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Run its command with `given` as its standard input; what it prints goes to its log."""
        command = self._command(container, container.command)
        with container.log.open("ab") as output:
            container.process = subprocess.Popen(command, stdin=given, stdout=output, stderr=output)
        self._started.append(container.process)
        return container.process

    def execute(
        self, container: Container, command: Sequence[str], timeout_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run one more command in a container, as `docker exec` does, with its environment."""
        return subprocess.run(self._command(container, command), capture_output=True, text=True, timeout=timeout_s)

    def kill(self, container: Container) -> None:
        """End all processes of a container at once, as a machine that loses its power does."""
        pids = self._enter("ip", "netns", "pids", container.name).stdout.split()
        self._enter("kill", "-9", *pids)
        assert container.process is not None
        container.process.wait(10)

    def terminate(self, container: Container) -> None:
        """Ask its first process to end, as `docker stop` does."""
        assert container.process is not None
        first = Path(f"/proc/{container.process.pid}/task/{container.process.pid}/children").read_text().split()
        for pid in first:
            os.kill(int(pid), signal.SIGTERM)

    def _command(self, container: Container, command: Sequence[str]) -> list[str]:
        root = self._directory / f"root-{container.name}"
        root.mkdir(exist_ok=True)
        mounts = self._directory / f"mounts-{container.name}"
        mounted = {**container.mounts, "/etc/hosts": self._hosts}
        # Programs that a mount would hide, as where this clone lies below /tmp.
        needed = (self.programs, ROOT, Path(sys.prefix))
        mounted |= {str(one): one for one in needed if any(one.is_relative_to(target) for target in container.mounts)}
        lines = [f"{source} {target}" for target, source in mounted.items()]
        mounts.write_text("\n".join(lines) + "\n")
        environ = {"PATH": f"{self.programs}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", **container.environ}
        variables = [f"{name}={value}" for name, value in environ.items()]
        mode = "ro" if container.is_read_only else "rw"
        network = ["ip", "netns", "exec", container.name]
        files = ["unshare", "--mount", "sh", "-c", _FILES, "sh", str(root), str(mounts), mode]
        return [*self._prefix(), *network, *files, "env", "-i", *variables, *command]

    def _prefix(self) -> list[str]:
        return ["nsenter", "-t", self._pid, "-U", "-m", "-n", "-p", "--preserve-credentials"]

    def _enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._prefix(), *command], check=True, capture_output=True, text=True)


def _programs(directory: Path) -> Path:
    """Make a folder with the programs that images bring: ours, the servers, and Alpine's `nc -z HOST PORT`."""
    directory.mkdir()
    # A link would not find the packages of the environment.
    (directory / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (directory / "headrace").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m ops.cli "$@"\n')
    connect = "import socket, sys; socket.create_connection((sys.argv[2], int(sys.argv[3])), 2)"
    (directory / "nc").write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{connect}' \"$@\"\n")
    for name in ("python", "headrace", "nc"):
        (directory / name).chmod(0o755)
    (directory / "nats-server").symlink_to(find_binary("nats-server"))
    redis = _redis()
    for name in ("redis-server", "redis-cli"):
        (directory / name).symlink_to(redis.parent / name)
    return directory


def _redis() -> Path:
    from ops.stack.servers import find_redis_server

    found = find_redis_server()
    assert found is not None
    return Path(found)
