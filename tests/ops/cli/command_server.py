"""A process that has imported what commands need, and forks for each one: starting Python anew takes ten times as long.

It reads one `Command` a line from its standard input and answers each with the exit status, in a line too.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import msgspec

from ops.cli import main

# What the commands import themselves, but none of the packages that only some of them may need.
PRELOADED = (
    "gateway.admission.api_keys",
    "ops.cli.batch_client",
    "ops.cli.chat",
    "ops.cli.dead",
    "ops.cli.dead_letter_box",
    "ops.cli.group",
    "ops.cli.keys",
    "ops.cli.publish",
    "ops.cli.setup",
    "ops.cli.tenant",
    "shared.nats_connection",
    "uvloop",
)


class Command(msgspec.Struct, frozen=True):
    """Arguments of `headrace`, its whole environment, and the files that are its standard streams."""

    arguments: list[str]
    environ: dict[str, str]
    cwd: str
    streams: tuple[str, str, str]


def run(command: Command) -> int:
    """Be this command, in a process of its own."""
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.environ)
    for number, (path, flags) in enumerate(zip(command.streams, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["headrace", *command.arguments]
    try:
        main()
    except SystemExit as ending:
        return int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    return 0


def serve() -> None:
    """Answer commands until the standard input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    for line in commands:
        child = os.fork()
        if child == 0:
            os._exit(run(msgspec.json.decode(line, type=Command)))
        _, status = os.waitpid(child, 0)
        answers.write(b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
