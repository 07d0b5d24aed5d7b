"""The processes of ranks on one host, and the board that they share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from gpu_worker.execution.ranks.board import Life, make_board
from gpu_worker.execution.ranks.messages import REPLIES, Failure, Reply, Start, encode, receive
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.registry import read_model_config
from kernels.collectives import SLOT_BYTES

_MEMBER = "gpu_worker.execution.ranks.member"


class RankProcess(ABC):
    """The process of a rank, on this host or another.

    Attributes:
        pid: Of the process, on its host.
        name: Of rank and process, for people.
        freeze_s: Time without a tick after which it counts as standing still; the group sets it.
        is_serving: It has loaded its part of the model; the group sets it.
        epitaph: Why it has ended; None while it has not.
    """

    def __init__(self, rank: int, pid: int, name: str) -> None:
        """Begin as one that loads."""
        self.rank = rank
        self.pid = pid
        self.name = name
        self.freeze_s = 0.0
        self.is_serving = False
        self.epitaph: str | None = None

    @property
    @abstractmethod
    def is_starved(self) -> bool:
        """Whether a thread of it waits for a core, or has one; no where the system does not tell."""

    @abstractmethod
    def tell(self, message: bytes) -> None:
        """Send it an encoded message; that it is gone is found by its end."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Let it end by itself, kill it if it has not by then, and wait for its end."""


Hear = Callable[[RankProcess, Reply | None], None]


class _LocalProcess(RankProcess):
    """The process of a rank on this host."""

    def __init__(self, start: Start, hear: Hear) -> None:
        """Start it. What it says goes to `hear`, on a thread of its own; None is its end."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(start.board_fd,)
        )
        super().__init__(start.rank, self._process.pid, f"rank {start.rank} (process {self._process.pid})")
        self._hear = hear
        self._reader = threading.Thread(target=self._read, name=f"rank {self.rank}", daemon=True)
        self._reader.start()
        self.tell(encode(start))

    @property
    def is_starved(self) -> bool:
        try:
            tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
            states = [path.read_text().rpartition(")")[2].split()[0] for path in tasks]
        except (OSError, IndexError):
            return False
        return "R" in states

    def tell(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(message)
            self._process.stdin.flush()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def close(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self.kill()
        self._process.wait()
        if self._reader is not threading.current_thread():
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        problem = None
        with self._process.stdout as answers:
            while (reply := receive(answers, REPLIES)) is not None:
                if isinstance(reply, Failure):
                    problem = reply.problem
                else:
                    self._hear(self, reply)
        status = self._process.wait()
        self.epitaph = f"{self.name} " + (f"ended with status {status}" if problem is None else f"failed: {problem}")
        self._hear(self, None)


class LocalHost:
    """Where some ranks of a group run: here.

    Attributes:
        processes: Those that were started last, by rank.
    """

    def __init__(
        self, config: RunnerConfig, *, is_shared: bool, log_level: str, log_format: str, interface: str = ""
    ) -> None:
        """Make the board."""
        # Ranks put the streams of a step down in float32.
        stream_bytes = 4 * read_model_config(config.model).hidden_size * config.max_num_batched_tokens
        self.board = make_board(config.num_ranks, max(SLOT_BYTES, -(-stream_bytes // 64) * 64))
        self.processes: dict[int, _LocalProcess] = {}
        self._config = config
        self._settings = (is_shared, interface, log_level, log_format)

    def start(self, rank: int, hear: Hear) -> RankProcess:
        """Start the process of a rank."""
        self.processes[rank] = process = _LocalProcess(Start(rank, self._config, self.board.fd, *self._settings), hear)
        return process

    def tell(self, message: bytes) -> None:
        """Send an encoded message to all ranks that were started here."""
        for process in self.processes.values():
            process.tell(message)

    def life(self, rank: int) -> Life:
        """Return what a rank shows of its life."""
        return self.board.life(rank)

    def end(self) -> None:
        """Tell ranks that wait for others that these do not come."""
        self.board.end()

    def begin_again(self) -> None:
        """Prepare for ranks that meet anew. No rank may be in a sum or a gather."""
        self.board.begin_again()
