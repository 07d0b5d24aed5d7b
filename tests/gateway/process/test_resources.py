"""The limit of open files and the return of memory, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


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
