"""One supervised process: started, watched, restarted with growing pauses when it ends, and stopped.

`Child` owns the process. Standard output and error of the process come through a pipe: every line goes to the log,
whose size is bounded, warnings also to the console, and the last lines are kept to say why the process ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import STDOUT, Process
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from ops.stack.console import Console
from ops.stack.tether import tethered


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A port on loopback and what to ask there; without a question the server speaks first."""

    port: int
    question: bytes = b""


# A NATS server greets every connection; Redis answers without a password too, with an error.
NATS_QUESTION = b""
REDIS_QUESTION = b"PING\r\n"


def gateway_question(operator_key: str) -> bytes:
    """Return the question to ask at a gateway's operator port."""
    head = f"GET /health/live HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {operator_key}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n"


async def answers(check: HealthCheck, timeout_s: float) -> bool:
    """Ask on a new connection, and tell whether anything comes back in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", check.port)
            try:
                writer.write(check.question)
                return bool(await reader.read(1))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
# A process that lived so long is taken to have been healthy: the next pause is the first one again.
HEALTHY_AFTER_S = 10.0
_LAST_LINES = 5
_PIPE_GRACE_S = 0.5
# Roles whose processes end with code 0 only once they have finished their requests.
_DRAINED = frozenset({"gateway", "worker"})

MAX_LOG_BYTES = 16 << 20
_MAX_LINE_BYTES = 64 << 10


class ChildLog:
    """Appends lines to a file; when it is full, the file becomes `<name>.1` and a new one begins."""

    def __init__(self, path: Path) -> None:
        """Open the file, keeping what earlier runs wrote.

        A child runs without one where that fails: its folder was deleted meanwhile, or the disk is full.
        """
        self._path = path
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = self._opened()

    async def read_from(self, stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
        """Copy the stream to the file until it ends, and call `on_line` with each line, without its newline."""
        rest = b""
        while data := await stream.read(_MAX_LINE_BYTES):
            self._write(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                on_line(line)
        if rest:
            on_line(rest)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        # A child goes on while the disk is full: its lines are lost, and it is not held up by a pipe that is not read.
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.tell() + len(data) > MAX_LOG_BYTES:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._file or self._opened()
            self._file.write(data)

    def _opened(self) -> FileIO:
        return self._path.open("ab", buffering=0)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run one process.

    Attributes:
        role: Its kind: `nats`, `redis`, `gateway` or `worker`.
        stop_timeout_s: Time it gets to end by itself after SIGTERM.
        health_check: What it answers while it runs; None for a worker, whose heartbeats say that.
    """

    role: str
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    stop_timeout_s: float
    health_check: HealthCheck | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: its return code, negative for a signal, and the last lines it wrote."""

    returncode: int
    last_lines: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Say in words how the process ended."""
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        try:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        except ValueError:
            return f"was killed by signal {-self.returncode}"


class Child:
    """Keeps one process running until told to stop; `exits` counts how often it has ended by itself."""

    def __init__(
        self,
        spec: ChildSpec,
        log_directory: Path,
        console: Console,
        *,
        started: Callable[[Child], None],
        ended: Callable[[Child, Exit], bool],
        logged: Callable[[bytes], None] | None = None,
    ) -> None:
        """Prepare. `ended` is called after each unexpected end, and returns whether to restart the process."""
        self.spec = spec
        self.pid: int | None = None
        self.exits = 0
        self._console = console
        self._log_file = log_directory / f"{spec.name}.log"
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._started = started
        self._ended = ended
        self._logged = logged
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name=self.spec.name)

    async def stop(self) -> None:
        """Ask the process to end; kill it if it has not after `spec.stop_timeout_s`."""
        self._stopping.set()
        if self._task is None:
            return
        if self.pid is None:
            # Between two lives, or before the first.
            self._task.cancel()
        else:
            self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._task], timeout=self.spec.stop_timeout_s)
        if not done:
            self._console.say(self.spec.name, f"did not end within {self.spec.stop_timeout_s:g} s; killing it")
            self.kill()
            await asyncio.wait([self._task])

    def kill(self) -> None:
        """End the process, and whatever it has started in its group, at once and for good."""
        self._stopping.set()
        self.replace()

    def replace(self) -> None:
        """End the process and its group at once, by a signal that also ends one that is stopped; it starts anew."""
        self._kill_group()

    def _kill_group(self) -> None:
        if self.pid is not None:
            # The child leads the group, so the number is ours as long as the child is not known to have ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _keep_running(self) -> None:
        pause_s = FIRST_PAUSE_S
        clock = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            began = clock()
            exit_ = await self._run_once()
            if self._stopping.is_set():
                return
            self.exits += 1
            if clock() - began > HEALTHY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            if not self._ended(self, exit_):
                return
            is_drained = exit_.returncode == 0 and self.spec.role in _DRAINED
            reason = "was drained" if is_drained else exit_.reason
            self._console.say(self.spec.name, f"{reason}; starting it again in {pause_s:g} s")
            for line in () if is_drained else exit_.last_lines:
                self._console.say(self.spec.name, f"  | {line}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _run_once(self) -> Exit:
        self._last_lines.clear()
        # A pipe of our own: a process with one of asyncio's counts as running until everybody has closed it.
        reading_end, writing_end = os.pipe()
        output = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(output)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reading_end, "rb"))
        try:
            # A session of its own: Ctrl-C in the terminal reaches only the supervisor, which then stops in order.
            self._process = await asyncio.create_subprocess_exec(
                *tethered(self.spec.command), env=dict(self.spec.environ),
                stdin=asyncio.subprocess.DEVNULL, stdout=writing_end, stderr=STDOUT, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writing_end)
        self.pid = self._process.pid
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        self._started(self)
        with contextlib.closing(ChildLog(self._log_file)) as log, contextlib.closing(pipe):
            reading = asyncio.create_task(log.read_from(output, self._on_line))
            returncode = await self._process.wait()
            # What it has started has no use without it; one that is stopped would not even notice.
            self._kill_group()
            self.pid = None
            await asyncio.wait([reading], timeout=_PIPE_GRACE_S)
            reading.cancel()
        return Exit(returncode, tuple(self._last_lines))

    def _on_line(self, line: bytes) -> None:
        if self._logged is not None:
            self._logged(line)
        if line.strip():
            self._last_lines.append(line.decode(errors="replace"))
        if not self._stopping.is_set():
            self._console.relay(self.spec.name, line)


def children_of(pid: int) -> list[int]:
    """Return the pids of the processes that a process has started and that still run, oldest first."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:
            # The thread, and perhaps the process, has ended meanwhile.
            continue
    return sorted(found)


def is_stopped(pid: int) -> bool:
    """Whether a signal, SIGSTOP or the terminal's Ctrl-Z, has stopped a process; one under a debugger is not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The command's name stands in parentheses and may hold anything, spaces and parentheses too.
    return status.rpartition(")")[2].split()[0] == "T"
