"""The system under test: NATS, Redis, gateways and workers as real processes, with faulty links where wanted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from gateway.admission.api_keys import create_key
from ops.bench.systems import accepts
from ops.chaos.fault_proxy import FaultProxy, LinkState
from ops.chaos.outcome import NotPossibleHereError
from ops.chaos.part import Part
from ops.stack import servers
from ops.stack.config import DEMO_MODEL
from ops.stack.ports import free_port
from ops.stack.servers import find_nats_server, find_redis_server
from shared.batch_streams import DEFAULT_TENANT, batch_stream
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from shared.subjects import ALL_WORKERS


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's last heartbeat, and the monotonic time at which it came."""

    heartbeat: Heartbeat
    at: float


class Observer:
    """Owns one connection, made again after any fault; hears workers by name."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.workers: dict[str, Seen] = {}
        self._access = (url, user, password)
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._client: Client | None = None

    async def start(self) -> None:
        """Connect, make the streams, and listen to the workers."""
        url, user, password = self._access
        self._client = await connect(url, role="admin", name="chaos-observer", user=user, password=password)
        await ensure_streams(self._client.jetstream(), StreamLimits(), [DEFAULT_TENANT])
        await self._client.subscribe(ALL_WORKERS, cb=self._hear)

    async def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            with contextlib.suppress(NatsError):
                await self._client.close()

    def live_workers(self, silence_s: float) -> list[Heartbeat]:
        """Return the last heartbeats of the workers that were heard in the last `silence_s` seconds."""
        since = time.monotonic() - silence_s
        return [seen.heartbeat for seen in self.workers.values() if seen.at > since]

    async def num_queued(self) -> dict[str, int]:
        """Return how many messages the interactive and the batch stream hold, by their names.

        Raises:
            nats.errors.Error: NATS does not answer.
        """
        assert self._client is not None
        js, names = self._client.jetstream(), (INTERACTIVE_STREAM, batch_stream(DEFAULT_TENANT))
        infos = await asyncio.gather(*map(js.stream_info, names))
        return {name: info.state.messages for name, info in zip(names, infos, strict=True)}

    async def _hear(self, message: Msg) -> None:
        try:
            heartbeat = self._decoder.decode(message.data)
        except msgspec.MsgspecError:
            return  # a scenario's own malformed one
        self.workers[heartbeat.worker] = Seen(heartbeat, time.monotonic())


_SOURCE = Path(__file__).with_name("clock_shim.c")


class WallClock:
    """The wall clock of the processes that are started with `environ`; the machine's own stays as it is."""

    def __init__(self, directory: Path) -> None:
        """Build the shim in `directory`; `NotPossibleHereError` if there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NotPossibleHereError("moving the wall clock of a process needs a C compiler")
        library = directory / "clock_shim.so"
        self._file = directory / "clock_offset"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
        self.jump(0)
        self.environ = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(self._file)}

    def jump(self, offset_s: int) -> None:
        """Set the clock to the machine's time plus an offset, at once and for all processes."""
        # In place: the file stays mapped into the processes.
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", offset_s))


API_KEY = "sk-chaos"
MODEL = "demo"
TENANT = "slots"
MAX_CONCURRENT = 20
_PASSWORD = "chaos"
_ROOMS = ("gateway", "gpu_worker", "shared", "kernels", "ops")


@dataclass(frozen=True)
class SystemOptions:
    """What to start.

    Attributes:
        simulate_ms: Pace of the simulated engine; None runs the demo model itself.
        worker, gateway: Settings without `HEADRACE_`, in lower case, e.g. `{"max_num_seqs": 8}`.
        worker_module: What `python -m` runs as a worker.
        has_faulty_links: Put a fault proxy between each part and each server.
        link_bytes_per_s: What a faulty link passes while it is narrow; without it none may be.
        has_movable_clock: Gateways and workers have a wall clock that a fault may move.
        commit_of: The commit of which a gateway or worker is, by the name of the part; today's source if not named. It
            runs in this environment.
    """

    num_gateways: int = 1
    num_workers: int = 2
    simulate_ms: float | None = 10.0
    worker: dict[str, object] = field(default_factory=dict)
    gateway: dict[str, object] = field(default_factory=dict)
    worker_module: str = "gpu_worker"
    has_faulty_links: bool = False
    link_bytes_per_s: float | None = None
    has_movable_clock: bool = False
    commit_of: dict[str, str] = field(default_factory=dict)


class System:
    """A running system. Use as `async with`.

    Attributes:
        links: Fault proxies by (part, server), e.g. `("worker-0", "nats")`.
        clock: The wall clock of gateways and workers, where it is movable.
        keys_file: The keys of the gateways, which read it again when it changes.
        limited_key: A key that may have `MAX_CONCURRENT` requests at once.
        observer: An administrator's view of NATS.
    """

    def __init__(self, options: SystemOptions) -> None:
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
        self.nats_port = free_port()
        self.redis_port = free_port(taken=(self.nats_port,))
        self.links: dict[tuple[str, str], FaultProxy] = {}
        self.gateways: list[Part] = []
        self.workers: list[Part] = []
        self.gateway_ports: dict[str, int] = {}
        self.keys_file = self.directory / "keys.json"
        self.limited_key = ""
        self.clock: WallClock | None = None
        self.nats = self._nats_part()
        self.redis = self._redis_part()
        self.observer = Observer(f"nats://127.0.0.1:{self.nats_port}", "admin", _PASSWORD)

    def role_url(self, role: str) -> str:
        """Return where a client of this role connects: `gateway`, `worker`, or `batch` for a publisher of jobs."""
        return f"nats://{role}:{_PASSWORD}@127.0.0.1:{self.nats_port}"

    @property
    def parts(self) -> list[Part]:
        """All processes, servers last."""
        return [*self.gateways, *self.workers, self.nats, self.redis]

    def part(self, name: str) -> Part:
        """Return the process of a name, e.g. `worker-1` or `nats`."""
        return next(part for part in self.parts if part.name == name)

    def port(self, gateway: str) -> int:
        """Return the public port of a gateway."""
        return self.gateway_ports[gateway]

    async def __aenter__(self) -> System:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        if kind is None and "HEADRACE_CHAOS_KEEP" not in os.environ:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            print(f"logs are kept in {self.directory}", file=sys.stderr)

    async def set_links(self, state: LinkState, server: str, part: str | None = None) -> None:
        """Change what happens to bytes between a server and a part, or all parts."""
        for ends, link in self.links.items():
            if ends == (part or ends[0], server):
                await link.set(state)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until all workers that run are heard."""
        num_running = sum(worker.is_running for worker in self.workers)
        async with asyncio.timeout(timeout_s):
            while len(self.observer.live_workers(1.0)) < num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def supervised(self, restart_s: float) -> AsyncIterator[None]:
        """Start what dies by itself again, `restart_s` after its death, until the block ends."""

        async def supervise() -> None:
            while True:
                for part in self.parts:
                    if not part.is_running and not part.is_expected_dead:
                        await asyncio.sleep(restart_s)
                        part.num_exits += 1
                        part.launch()
                await asyncio.sleep(0.05)

        supervising = asyncio.create_task(supervise())
        try:
            yield
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)

    async def _start(self) -> None:
        if self.options.has_movable_clock:
            self.clock = WallClock(self.directory)
        for commit in set(self.options.commit_of.values()):
            _unpack(commit, self.directory / commit)
        await asyncio.gather(self.nats.start(), self.redis.start())
        await self.observer.start()
        self.limited_key = create_key(self.keys_file, tenant=TENANT, max_concurrent=MAX_CONCURRENT)[1]
        for index in range(self.options.num_workers):
            self.workers.append(await self._worker_part(f"worker-{index}"))
        for index in range(self.options.num_gateways):
            self.gateways.append(await self._gateway_part(f"gateway-{index}"))
        await asyncio.gather(*(part.start() for part in [*self.workers, *self.gateways]))
        await self.wait_ready()
        await asyncio.sleep(0.5)  # the gateways hear the workers too

    async def _stop(self) -> None:
        await self.observer.close()
        for part in self.parts:
            part.kill()
        for link in self.links.values():
            await link.close()

    def _nats_part(self) -> Part:
        command = [find_nats_server(), "-c", str(servers.NATS_CONFIG)]
        command += ["-a", "127.0.0.1", "-p", str(self.nats_port), "-sd", str(self.directory / "jetstream")]
        passwords = {servers.nats_password_variable(role): _PASSWORD for role in servers.NATS_ROLES}
        return self._part("nats", command, _environ() | passwords, lambda log: accepts(self.nats_port))

    def _redis_part(self) -> Part:
        binary = find_redis_server()
        assert binary is not None, "redis-server is not installed: install headrace[test]"
        command = [binary, str(servers.REDIS_CONFIG), "--port", str(self.redis_port), "--dir", str(self.directory)]
        return self._part("redis", command, _environ(), lambda log: accepts(self.redis_port))

    async def _worker_part(self, name: str) -> Part:
        settings: dict[str, object] = {
            "model": DEMO_MODEL,
            "served_model_name": MODEL,
            "device": "cpu",
            "num_threads": 1,
            "drain_timeout_s": 1,
            **await self._nats_access(name, "worker"),
            **self.options.worker,
        }
        if self.options.simulate_ms is not None:
            settings["simulate"] = self.options.simulate_ms
        return self._python_part(name, self.options.worker_module, settings)

    async def _gateway_part(self, name: str) -> Part:
        port = self.gateway_ports[name] = free_port()
        settings: dict[str, object] = {
            "port": port,
            "api_key": API_KEY,
            "keys_file": self.keys_file,
            "drain_timeout_s": 3,
            "redis_url": f"redis://127.0.0.1:{await self._link(name, 'redis', self.redis_port)}/0",
            **await self._nats_access(name, "gateway"),
            **self.options.gateway,
        }
        return self._python_part(name, "gateway", settings)

    async def _nats_access(self, name: str, role: str) -> dict[str, object]:
        port = await self._link(name, "nats", self.nats_port)
        return {"nats_url": f"nats://127.0.0.1:{port}", "nats_user": role, "nats_password": _PASSWORD}

    async def _link(self, name: str, server: str, port: int) -> int:
        if not self.options.has_faulty_links:
            return port
        proxy = self.links[name, server] = FaultProxy(port, bytes_per_s=self.options.link_bytes_per_s)
        await proxy.start()
        return proxy.port

    def _python_part(self, name: str, module: str, settings: dict[str, object]) -> Part:
        own = {f"HEADRACE_{setting.upper()}": str(value) for setting, value in settings.items()}
        environ = _environ() | own | ({} if self.clock is None else self.clock.environ)
        command = [sys.executable, "-m", module]
        if (commit := self.options.commit_of.get(name)) is not None:
            # Without -P, modules of the current directory would be imported first.
            command.insert(1, "-P")
            environ["PYTHONPATH"] = str(self.directory / commit)
        return self._part(name, command, environ, lambda log: " serving " in log or '"serving"' in log)

    def _part(self, name: str, command: list[str], environ: dict[str, str], is_ready: Callable[[str], bool]) -> Part:
        return Part(name, command, environ, self.directory / f"{name}.log", is_ready)


def _unpack(commit: str, directory: Path) -> None:
    """Write the source of a commit to a directory."""
    root = Path(__file__).parents[2]
    packing = subprocess.run(["git", "-C", root, "archive", commit, *_ROOMS], capture_output=True, check=False)
    if packing.returncode:
        raise NotPossibleHereError(f"the history has no commit {commit[:8]}: {packing.stderr.decode().strip()}")
    directory.mkdir()
    subprocess.run(["tar", "-x", "-C", directory], input=packing.stdout, check=True)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
