"""The command lines of the benches: one kind of parser, and lists of values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def bench_parser(module: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for `python -m ops.bench.MODULE`, which refuses options that it does not know."""
    return argparse.ArgumentParser(
        f"python -m ops.bench.{module}",
        description=description,
        epilog=epilog,
        formatter_class=_Help,
        allow_abbrev=False,
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = not isinstance(action.default, list) and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help or ''} (default: %(default)s)" if has_default else action.help


def positive(text: str) -> int:
    """Read a count of at least 1."""
    try:
        if (count := int(text)) >= 1:
            return count
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def writable(text: str) -> Path:
    """Read the name of a file, which can be written: that is known before anything is measured."""
    file = Path(text)
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: give a file in a directory that you may write to")
    return file


def add_list(
    parser: argparse.ArgumentParser,
    option: str,
    read: Callable[[str], Value],
    default: list[Value] | None,
    help: str,
    allowed: Collection[Value] = (),
) -> None:
    """Add an option of several values, separated by commas or spaces; `read` parses one, or raises ValueError."""

    def read_all(text: str) -> list[Value]:
        try:
            values = [read(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        for value in values:
            if allowed and value not in allowed:
                raise argparse.ArgumentTypeError(f"{value!r} is none of {_joined(allowed)}")
        return values

    text = f"{help}; of {_joined(allowed)}" if allowed else help
    metavar = option.lstrip("-").replace("-", "_").upper()
    parser.add_argument(
        option, nargs="+", type=read_all, action=_Flattened, default=default, metavar=metavar, help=text
    )


class _Flattened(argparse.Action):
    """Keeps the values of all its arguments as one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, [value for part in values for value in part])


def _joined(values: Collection[object]) -> str:
    return ", ".join(map(str, values))
