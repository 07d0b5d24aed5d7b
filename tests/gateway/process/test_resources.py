"""The limit of open files and the return of memory; what changes a process, in processes of their own."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
import textwrap

import pytest

from gateway.process.resources import RESERVED_FILES, affordable_connections, return_freed_memory

NEEDED = 500 + RESERVED_FILES


def run(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_soft_limit_of_open_files_is_raised_as_needed() -> None:
    out = run("""
        import resource
        from gateway.process.resources import RESERVED_FILES, affordable_connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700))
        print(affordable_connections(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES)
    """)
    assert out == "500 500"


def test_hard_limit_of_open_files_lowers_the_connections() -> None:
    out = run("""
        import resource
        from gateway.process.resources import RESERVED_FILES, affordable_connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
        print(affordable_connections(500) + RESERVED_FILES)
    """)
    assert out == "300"


def test_memory_of_large_blocks_goes_back_when_they_are_freed() -> None:
    out = run("""
        import psutil
        from gateway.process.resources import return_freed_memory
        return_freed_memory()
        rss = psutil.Process().memory_info
        before = rss().rss
        for size in (4 << 20, 1 << 20, 100 << 10):
            blocks = [bytearray(size) for _ in range((64 << 20) // size)]
            # Small ones in between keep a heap from shrinking.
            small = [bytearray(1000) for _ in range(1000)]
            del blocks
        print((rss().rss - before) >> 20)
    """)
    assert int(out) < 16


@pytest.mark.parametrize(
    ("soft", "hard", "affordable", "raised_to"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, None),
        (NEEDED, 2 * NEEDED, 500, None),
        (NEEDED - 1, 2 * NEEDED, 500, NEEDED),
        (64, resource.RLIM_INFINITY, 500, NEEDED),
        (64, NEEDED - 1, 499, NEEDED - 1),
        # The files of the process itself are there whatever the limit says.
        (64, RESERVED_FILES + 1, 1, RESERVED_FILES + 1),
        (64, RESERVED_FILES - 9, 1, RESERVED_FILES - 9),
    ],
)
def test_limit_is_raised_no_further_than_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, affordable: int, raised_to: int | None
) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_NOFILE: (soft, hard)}[kind])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    assert affordable_connections(500) == affordable
    assert asked == ([] if raised_to is None else [(resource.RLIMIT_NOFILE, (raised_to, hard))])


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    asked: list[str | None] = []

    def load(name: str | None) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr(ctypes, "CDLL", load)
    return_freed_memory()
    assert asked == [None]
