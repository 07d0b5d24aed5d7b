"""Logging: one line an event, `time level logger message key=value ...`, to standard error.

Code logs a constant message and puts what varies into `extra`, so that lines can be searched by message and parsed by
key. Values are quoted when they hold spaces, and never span lines: what a client sends cannot forge a log line.
"""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_MAX_VALUE_LENGTH = 500


class LineFormatter(logging.Formatter):
    """Writes a record as one line of `key=value` pairs."""

    def __init__(self, fields: dict[str, str]) -> None:
        """Append `fields` to every line, e.g. the process's role and name."""
        super().__init__()
        self._suffix = "".join(f" {key}={_quote(value)}" for key, value in fields.items())

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception's traceback becomes the value of `trace`."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{clock}.{int(record.msecs):03d}Z {record.levelname} {record.name} {_one_line(record.getMessage())}"]
        parts += [f"{key}={_quote(value)}" for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS]
        if record.exc_info:
            parts.append(f"trace={json.dumps(self.formatException(record.exc_info))}")
        return " ".join(parts) + self._suffix


def configure_logging(level: str, **fields: str) -> None:
    """Send the process's log lines of at least this level to standard error, replacing earlier handlers.

    Args:
        level: One of `LEVELS`.
        fields: Appended to every line, e.g. `role="worker"`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What torch tells of itself helps nobody who runs a server.
    logging.getLogger("torch").setLevel(max(logging.WARNING, root.level))


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quote(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_VALUE_LENGTH:
        text = text[:_MAX_VALUE_LENGTH] + "…"
    is_plain = text.isprintable() and text != "" and not any(mark in text for mark in ' "=\\')
    return text if is_plain else json.dumps(text)
