"""The command `headrace`. Everything heavy is imported by the command that needs it, so that the others start fast."""

from __future__ import annotations

import sys

_EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit: 2 with one line on standard error when a setting or a server is at fault."""
    try:
        # Imported within `try`: the imports take most of the start, during which Ctrl-C may come as well.
        from ops.cli.command_line import run

        code = run()
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    sys.exit(code)
