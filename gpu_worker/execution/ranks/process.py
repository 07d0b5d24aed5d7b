"""The processes of ranks on one host, and the board that they share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gpu_worker.execution.ranks.board import make_board
from gpu_worker.execution.ranks.messages import Failure, Reply, Start, encode, receive
from gpu_worker.execution.runner_config import RunnerConfig

_MEMBER = "gpu_worker.execution.ranks.member"


class RankProcess:
    """The process of a rank.

    Attributes:
        rank: Its number.
        pid: Of the process.
        freeze_s: Time without a tick after which it counts as standing still; the group sets it.
        is_serving: It has loaded its part of the model; the group sets it.
        epitaph: Why it has ended; None while it has not.
    """

    def __init__(self, start: Start, hear: Callable[[RankProcess, Reply | None], None]) -> None:
        """Start it. What it says goes to `hear`, on a thread of its own; None is its end."""
        self.rank = start.rank
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MEMBER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(start.board_fd,),
        )
        self.pid = self._process.pid
        self.freeze_s = 0.0
        self.is_serving = False
        self.epitaph: str | None = None
        self._hear = hear
        self._reader = threading.Thread(target=self._read, name=f"rank {self.rank}", daemon=True)
        self._reader.start()
        self.tell(encode(start))

    @property
    def is_starved(self) -> bool:
        """Whether a thread of it waits for a core, or has one; no where the system does not tell."""
        try:
            tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
            states = [path.read_text().rpartition(")")[2].split()[0] for path in tasks]
        except (OSError, IndexError):
            return False
        return "R" in states

    def tell(self, message: bytes) -> None:
        """Send it an encoded message; that it is gone is found by its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(message)
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self, timeout_s: float) -> None:
        """Let it end by itself, kill it if it has not by then, and wait for its end."""
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
        """Pass on what it says."""
        assert self._process.stdout is not None
        problem = None
        with self._process.stdout as answers:
            while (reply := receive(answers, Reply)) is not None:
                if isinstance(reply, Failure):
                    problem = reply.problem
                else:
                    self._hear(self, reply)
        status = self._process.wait()
        name = f"rank {self.rank} (process {self.pid})"
        self.epitaph = f"{name} ended with status {status}" if problem is None else f"{name} failed: {problem}"
        self._hear(self, None)


class RankHost:
    """Starts ranks on this host.

    Attributes:
        board: What they share.
    """

    def __init__(self, config: RunnerConfig, *, is_shared: bool, log_level: str, log_format: str) -> None:
        """Make the board."""
        self.board = make_board(config.num_ranks)
        self._config = config
        self._is_shared = is_shared
        self._log = (log_level, log_format)

    def start(self, rank: int, hear: Callable[[RankProcess, Reply | None], None]) -> RankProcess:
        """Start the process of a rank."""
        return RankProcess(Start(rank, self._config, self.board.fd, self._is_shared, *self._log), hear)
