from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from ops.cli import command_line, main
from ops.cli.command_line import out_of_memory
from ops.cli.parts import require
from ops.stack.config import DEMO_MODEL
from shared.errors import DependencyError

TORCH = "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
WORKER = ("worker", "--model", str(DEMO_MODEL), "--nats-url", "nats://127.0.0.1:1")


OF_MEMORY = ImportError("numpy cannot be imported")
OF_MEMORY.__cause__ = MemoryError()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OF_MEMORY,
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError(TORCH),
        RuntimeError("std::bad_alloc"),
    ],
    ids=repr,
)
def test_errors_of_too_little_memory_are_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 << 30, 3 << 30))
    assert str(out_of_memory(error)).startswith("out of memory: this process may map 3072 MiB (`ulimit -v`)")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert str(out_of_memory(error)).startswith("out of memory: end other processes")


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ImportError("no module"), OSError(errno.ENOENT, "x"), ValueError()], ids=repr
)
def test_other_errors_are_raised_as_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_memory(error) is None
    monkeypatch.setattr(command_line, "_run", lambda: command_line._exit_without_memory(error))
    with pytest.raises(type(error)):
        main()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to a limit of addresses")
@pytest.mark.parametrize("limit_mib", [300, 1500, 3000])
def test_worker_under_a_limit_of_addresses_says_so(limit_mib: int) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    # A shell of its own: nothing runs between fork and exec here.
    command = ["sh", "-c", 'ulimit -v "$0" && exec "$@"', str(limit_mib << 10), sys.executable, "-m", "ops.cli"]
    done = subprocess.run([*command, *WORKER], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


def test_missing_packages_are_named_with_what_installs_them() -> None:
    with pytest.raises(DependencyError, match=r"no_such_package not installed: `pip install 'headrace\[worker\]'`"):
        require("worker", "sys", "no_such_package")
