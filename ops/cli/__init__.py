"""The command `headrace`. Everything heavy is imported by the command that needs it, so that the others start fast."""

from __future__ import annotations

import sys

from shared.errors import HeadraceError

_EXIT_BAD_SETTINGS = 2
_EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit: 2 with one line on standard error when a setting or a server is at fault."""
    try:
        code = _run()
    except KeyboardInterrupt:  # also while the command's code is still being imported
        code = _EXIT_INTERRUPTED
    sys.exit(code)


def _run() -> int:
    import logging

    import click

    from ops.cli.group import headrace

    # Warnings of a command that keeps no log, such as what NATS refused.
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
        # Whoever read our output has gone, as with `headrace ... | head`; do not fail again while flushing at exit.
        sys.stdout = None
        code = 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"headrace: {error.filename}: {error.strerror}", file=sys.stderr)
        code = _EXIT_BAD_SETTINGS
    return code
