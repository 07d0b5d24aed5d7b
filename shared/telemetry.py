"""Logging: one line an event, `time level logger message key=value ...` or a JSON object, to standard error.

Code logs a constant message and puts what varies into `extra`, so that lines can be searched by message and parsed by
key. Values are quoted when they hold spaces, and never span lines: what a client sends cannot forge a log line.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_MAX_VALUE_LENGTH = 500
# Of characters that need no quotes; others are looked at one by one.
_is_plain = re.compile(r"[!#-<>-\[\]-~]+").fullmatch
# Tracebacks are worth more room; what a client sends is bounded where it is logged.
_MAX_JSON_LENGTH = 20_000


class LineFormatter(logging.Formatter):
    """Writes a record as one line of `key=value` pairs."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._suffix = "".join(f" {key}={_quote(value)}" for key, value in fields.items())

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception's traceback becomes the value of `trace`."""
        message = record.getMessage()
        message = message if message.isprintable() else json.dumps(message)[1:-1]
        parts = [f"{_time(record)} {record.levelname} {record.name} {message}"]
        parts += [f"{key}={_quote(value)}" for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS]
        if record.exc_info:
            parts.append(f"trace={json.dumps(self.formatException(record.exc_info))}")
        return " ".join(parts) + self._suffix


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception's traceback becomes `trace`."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps({key: _plain(value) for key, value in (line | self._fields).items()})


def configure_logging(level: str, log_format: str = "text", **fields: str) -> None:
    """Send log lines of at least this level to standard error, replacing earlier handlers; `fields` end every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else LineFormatter(fields))
    # Lines do not name the place in the source, which is looked for on the stack, nor threads and processes.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # torch's own log lines do not help an operator.
    logging.getLogger("torch").setLevel(max(logging.WARNING, root.level))


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _plain(value: object) -> object:
    """Return what JSON can hold; texts are shortened, and numbers that it cannot hold are texts."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)[:_MAX_JSON_LENGTH]


def _quote(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if len(text) > _MAX_VALUE_LENGTH:
        text = text[:_MAX_VALUE_LENGTH] + "…"
    if _is_plain(text):
        return text
    needs_quotes = not text.isprintable() or text == "" or any(mark in text for mark in ' "=\\')
    return json.dumps(text) if needs_quotes else text
