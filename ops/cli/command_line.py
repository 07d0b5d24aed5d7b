"""Runs the command line: every error that a user can mend is one line and an exit status."""

from __future__ import annotations

import errno
import os
import resource
import sys

from ops.cli.interrupts import interrupts_kept
from shared.errors import HeadraceError

_EXIT_FAILED = 1
_EXIT_BAD_SETTINGS = 2
_EXIT_INTERRUPTED = 130
# How torch's allocator, C++ and the loader of libraries word "no memory".
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "failed to map segment", "out of memory")
_OF_FULL_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run() -> int:
    """Run the command line and return its exit status: 2 when a setting or a server is at fault.

    Raises:
        KeyboardInterrupt: It was interrupted; also while the command's code is still being imported.
    """
    with interrupts_kept():
        return _EXIT_BAD_SETTINGS if _is_nowhere() else _run()


def _run() -> int:
    import logging

    import click

    from ops.cli.group import headrace

    # Warnings of a command without a log, such as refusals by NATS.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("headrace: %(message)s"))
    try:
        code: int = headrace.main(prog_name="headrace", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = _EXIT_INTERRUPTED
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        code = _EXIT_BAD_SETTINGS
    except BrokenPipeError:
        # The reader of our output has gone, as with `headrace ... | head`; do not fail again while flushing at exit.
        sys.stdout = None
        code = _EXIT_FAILED
    except (MemoryError, ImportError, RuntimeError) as error:
        code = _exit_without_memory(error)
    except OSError as error:
        if error.filename is None and error.errno not in _OF_FULL_DISKS:
            return _exit_without_memory(error)
        # Errors of opened files have a name; those of standard output have none.
        print(f"headrace: {error.filename or 'the output cannot be written'}: {error.strerror}", file=sys.stderr)
        code = _EXIT_BAD_SETTINGS
        if error.filename is None:
            sys.stdout = None
    return code


def _exit_without_memory(error: Exception) -> int:
    """Say that memory is short, and return the exit status; raise any other error again."""
    told = out_of_memory(error)
    if told is None:
        raise error
    print(f"headrace: {told}", file=sys.stderr)
    return _EXIT_FAILED


def out_of_memory(error: BaseException) -> str | None:
    """Return one line for an error that comes of too little memory, naming the limit if there is one; else None."""
    if not any(_is_of_memory(each) for each in (error, error.__cause__)):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        limited = f"this process may map {limit >> 20} MiB (`ulimit -v`), and needs more"
        return f"out of memory: {limited}; PyTorch alone maps some gigabytes: raise the limit, or unset it"
    return "out of memory: end other processes, raise the limit of this container, or choose a smaller model or cache"


def _is_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, ImportError | OSError | RuntimeError) and any(word in str(error) for word in _NO_MEMORY)


def _is_nowhere() -> bool:
    """Report a deleted working directory: every relative path would fail, with an error that explains nothing."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("headrace: the working directory does not exist any more; change to one that does", file=sys.stderr)
        return True
    return False
