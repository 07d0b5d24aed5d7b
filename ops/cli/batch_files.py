"""`headrace batch submit`, `watch` and `results`: batches of OpenAI's API from the terminal.

The system computes the batch: `watch` can be stopped and called again at any time to see the progress.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ops.cli.batch_api import BATCH_ID, ENDED, BatchApi, endpoint_of
from ops.cli.options import settings_command
from ops.cli.running_system import ServerRefusedError, find_endpoint, tell
from shared.config import setting
from shared.errors import HeadraceError

_POLL_S = 0.5
_AWAY_S = 2.0
_TELL_EVERY_S = 5.0
_BAR = 30
_MAX_TOLD = 20


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Where the HTTP API is."""

    url: str | None = setting(
        None, "Where the system runs; found through --state-dir of `headrace batch` if not given."
    )
    api_key: str | None = setting(
        None, "API key; found through --state-dir of `headrace batch` if not given.", secret=True
    )

    def api(self) -> BatchApi:
        """Return the API; the state directory is that of `headrace batch`."""
        return BatchApi(find_endpoint(self.url, self.api_key, click.get_current_context().obj.state_dir))


@dataclass(frozen=True, slots=True)
class SubmitConfig(ApiAccess):
    """What to submit, and for how long."""

    completion_window: str = setting("24h", "Time after which lines that are not answered expire: 30m, 24h, 7d.")


def submit(config: SubmitConfig, file: Path, watch: bool) -> int:
    """Upload FILE and have its lines computed.

    FILE is JSON Lines of OpenAI's Batch API, up to 50,000 lines for one endpoint. Prints the batch as JSON, with
    --watch when it has ended.
    """
    endpoint, api = endpoint_of(file), config.api()
    size, bar = file.stat().st_size, _Bar("uploaded", "kB")
    file_id = api.upload(file, lambda num: bar.show(-(-num // 1000), -(-size // 1000), num == size))
    bar.end()
    try:
        batch = api.create(file_id, endpoint, config.completion_window)
    except ServerRefusedError:
        # One that a batch reads after all stays.
        with contextlib.suppress(ServerRefusedError):
            api.delete_file(file_id)
        raise
    if not watch:
        print(json.dumps(shown_batch(batch)), flush=True)
        return 0
    tell(f"submitted as {batch['id']}")
    return _watch(api, batch["id"], is_printed=True)


def watch(config: ApiAccess, batch_id: str) -> int:
    """Show the progress of a batch until it has ended; may be closed and called again.

    Exits with 0 if every line has an answer. Wrong lines of a batch that failed are listed.
    """
    return _watch(config.api(), _checked(batch_id))


def results(config: ApiAccess, batch_id: str, errors: bool, follow: bool) -> int:
    """Print the lines of output of a batch, in the order of their completion, also while it runs.

    With --follow the status is 1 unless the batch has completed.
    """
    api, kind, num_bytes = config.api(), "error" if errors else "output", 0
    try:
        while True:
            batch = api.get(_checked(batch_id))
            file_id = batch[f"{kind}_file_id"] or batch[f"partial_{kind}_file_id"]
            if file_id is not None:
                num_bytes = api.download(file_id, num_bytes, sys.stdout.buffer)
                sys.stdout.buffer.flush()
            if not follow or batch["status"] in ENDED:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 130
    if not num_bytes:
        what = "errors" if errors else "answers"
        tell(f"{batch['status']}: no {what}; `headrace batch watch {batch_id}` shows the progress")
    return 1 if follow and batch["status"] != "completed" else 0


def _checked(batch_id: str) -> str:
    if BATCH_ID.fullmatch(batch_id) is None:
        raise HeadraceError(f"{batch_id[:64]!r} is not an id of a batch, which `headrace batch submit` prints")
    return batch_id


def _watch(api: BatchApi, batch_id: str, is_printed: bool = False) -> int:
    bar = _Bar("done", "lines")
    try:
        while True:
            batch = _patiently(api, batch_id)
            counts = batch["request_counts"]
            num, failed = counts["completed"] + counts["failed"], counts["failed"]
            has_ended = batch["status"] in ENDED
            more = f", {failed} of them without an answer" if failed else ""
            bar.show(num, counts["total"], has_ended, f"{batch['status']}{more}", batch["expires_at"] - time.time())
            if has_ended:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        bar.end()
        tell(f"the batch goes on; `headrace batch watch {batch_id}` shows it again")
        return 130
    bar.end()
    for error in ((batch["errors"] or {}).get("data") or ())[:_MAX_TOLD]:
        place = f"line {error['line']}: " if error["line"] else ""
        tell(f"{place}{error['message']} ({error['code']})")
    tell(f"{batch['status']}: {counts['completed']} of {counts['total']} lines have an answer")
    if is_printed:
        print(json.dumps(shown_batch(batch)), flush=True)
    return 0 if batch["status"] == "completed" and not failed else 1


def _patiently(api: BatchApi, batch_id: str) -> dict[str, Any]:
    """Return a batch; a server that is away comes back."""
    is_told = False
    while True:
        try:
            return api.get(batch_id)
        except ServerRefusedError as error:
            if 0 < error.status < 500 and error.status != 429:
                raise
            if not is_told:
                tell(f"{error}; trying again")
                is_told = True
        time.sleep(_AWAY_S)


class _Bar:
    """A bar on a terminal, which is drawn again and again; elsewhere a line every few seconds."""

    def __init__(self, verb: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._unit, self._clock = verb, unit, clock
        self._began = self._told_at = clock()
        self._first: int | None = None
        self._is_open = False

    def show(self, num: int, total: int, is_last: bool, more: str = "", most_s: float = math.inf) -> None:
        """Show the progress; the remaining time is estimated from the rate since the first call.

        It is left out if it exceeds `most_s`.
        """
        now = self._clock()
        self._first = num if self._first is None else self._first
        is_terminal = sys.stderr.isatty()
        if not is_terminal and not is_last and now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        speed = (num - self._first) / max(0.001, now - self._began)
        left_s = (total - num) / speed if speed else math.inf
        left = f", about {left_s:.0f} s to go" if not is_last and num < total and left_s < most_s else ""
        text = f"{num} of {total} {self._unit} {self._verb}{f', {more}' if more else ''}{left}"
        if not is_terminal:
            tell(text)
            return
        full = _BAR * num // total if total else 0
        sys.stderr.write(f"\r[{'#' * full}{' ' * (_BAR - full)}] {text}\x1b[K")
        sys.stderr.flush()
        self._is_open = True

    def end(self) -> None:
        """End the line of the bar."""
        if self._is_open:
            sys.stderr.write("\n")
            self._is_open = False


def shown_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch without its empty fields."""
    return {name: value for name, value in batch.items() if value is not None}


_ID = click.Argument(["batch_id"], metavar="ID")
_FILE = click.Argument(["file"], type=click.Path(path_type=Path, dir_okay=False))


def _flag(name: str, text: str) -> click.Option:
    return click.Option([f"--{name}"], is_flag=True, help=text)


_RESULTS = (
    _ID,
    _flag("errors", "The lines that have no answer, instead of those that have."),
    _flag("follow", "Go on until the batch has ended."),
)
_WATCH = _flag("watch", "Show the progress until the batch has ended.")
COMMANDS = (
    settings_command(SubmitConfig, "submit", submit, [_FILE, _WATCH]),
    settings_command(ApiAccess, "watch", watch, [_ID]),
    settings_command(ApiAccess, "results", results, _RESULTS),
)
