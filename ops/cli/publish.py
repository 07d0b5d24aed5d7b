"""`headrace publish`: put batch requests straight onto the queue."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import settings_command
from ops.cli.publish_lines import PublishConfig, read_jobs, read_lines, wrong_file
from ops.cli.running_system import Endpoint, ServerRefusedError, find_nats
from ops.stack.state import ReadyFile, read_ready_file
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gateway.batches.line import BatchLine
    from shared.messages import Request

_MAX_NAMES = 10
_PROGRESS_EVERY_S = 5.0


def run(config: PublishConfig, prompt: str | None) -> int:
    """Put batch requests onto the queue.

    Workers run them when no interactive request wants the capacity. Give one PROMPT, or --file with JSON requests, one
    a line: {"text": ...} or {"messages": [...]}, and if wanted "id", "model", "tenant", "priority", "deadline" and
    "sampling". Prints one JSON object a request: where its result will be, or with --wait the result itself as soon as
    it is there. A file of OpenAI's Batch API ({"custom_id", "method", "url", "body"}) gives the lines of its output
    file; --max-tokens, --temperature and --seed do not apply to it.
    """
    found = list(read_lines(config.file, prompt))
    if not found:
        raise wrong_file(config.file, "", "no requests: one JSON object a line is expected")
    url, running = find_nats(config.nats_url, config.state_dir, config.tenant)
    served = _served_models(config, url, running)
    model = config.model_name or (served[0] if served and len(served) == 1 else None)
    try:
        requests, lines = read_jobs(config, model, found)
    except ConfigError as error:
        if served is None or error.variable != "HEADRACE_MODEL_NAME":
            raise
        others = f"{len(served)} models are served: {_shown(served)}; name one"
        told = others if served else "no worker is heard whose model it could be"
        raise ConfigError(error.variable, f"{error.problem}, and {told}") from None
    if served is not None:
        _check_served(config, {request.model for request in requests}, served)
    try:
        return asyncio.run(_publish(config, url, requests, lines))
    except KeyboardInterrupt:
        _tell("stopped; what is published runs all the same: publish a file whose lines have ids again for its results")
        return 130


def _served_models(config: PublishConfig, url: str, running: ReadyFile | None) -> list[str] | None:
    """Return what the system serves whose NATS this is; None where none is known, or it does not say."""
    from shared.audit import servers_in

    running = running or read_ready_file(config.state_dir)
    if running is None or servers_in(url) != servers_in(running.nats_url):
        return None
    try:
        return Endpoint(running.url, running.api_key).models()
    except ServerRefusedError:
        return None


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def _check_served(config: PublishConfig, models: set[str], served: list[str]) -> None:
    """Refuse models that are not served if the system serves others; while it serves none, jobs may wait.

    Raises:
        ConfigError: One of them is not served.
    """
    unserved = sorted(models.difference(served))
    names = _shown(served)
    if unserved and served and not config.queue_unserved:
        problem = f"no worker serves {unserved[0][:64]!r}; served: {names}; with --queue-unserved its jobs wait for one"
        raise ConfigError("HEADRACE_MODEL_NAME", problem)
    for model in unserved:
        _tell(
            f"no worker serves {model[:64]!r} now; its jobs wait in the queue until one does; served: {names or 'none'}"
        )


def _tell(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr)


async def _publish(config: PublishConfig, url: str, requests: list[Request], lines: dict[str, BatchLine]) -> int:
    from ops.cli.batch_client import BatchClient

    async with BatchClient(url, config.nats_user, config.nats_password, config, _tell) as client:
        if not config.wait:
            for request in requests:
                custom = {"custom_id": lines[request.id].custom_id} if request.id in lines else {}
                told = {"id": request.id, "tenant": request.tenant, "result": await client.publish(request)}
                print(json.dumps({**custom, **told}))
            return 0
        num_lines = len(requests) - len(lines) + len({line.custom_id for line in lines.values()})
        # A reader of the results as they come sees the progress.
        progress = _Progress(num_lines, (lambda text: None) if sys.stdout.isatty() else _tell)
        failures: Counter[str] = Counter()
        async for result in _answers(client.results(requests, config.timeout_s), lines):
            print(json.dumps(result), flush=True)
            failure = _failure(result)
            failures.update([] if failure is None else [failure])
            progress.note(has_failed=failure is not None)
        if not failures:
            return 0
        counts = ", ".join(f"{number} {failure}" for failure, number in failures.most_common())
        _tell(f"{failures.total()} of {num_lines} results are not answers ({counts})")
        return 1


def _failure(result: dict[str, Any]) -> str | None:
    """Return how a request ended that has no answer: failed, expired or cancelled."""
    if "custom_id" not in result:
        finish = str(result.get("finish"))
        return finish if finish in ("failed", "expired", "cancelled") else None
    if result["response"] is None:
        return str(result["error"]["code"]).removeprefix("batch_")
    return None if result["response"]["status_code"] == 200 else "failed"


class _Progress:
    """Tells every few seconds how many results have come, and at the end if it told that before."""

    def __init__(self, num_all: int, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._num_failed = 0
        self._num_all, self._num = num_all, 0
        self._tell, self._clock = tell, clock
        self._began = self._told_at = clock()

    def note(self, *, has_failed: bool) -> None:
        """Count a result."""
        self._num += 1
        self._num_failed += has_failed
        now = self._clock()
        is_last_of_many = self._num == self._num_all and self._told_at > self._began
        if now - self._told_at < _PROGRESS_EVERY_S and not is_last_of_many:
            return
        self._told_at = now
        failed = f", {self._num_failed} of them failed" if self._num_failed else ""
        left_s = (now - self._began) / self._num * (self._num_all - self._num)
        left = f"; about {left_s:.0f} s to go" if self._num < self._num_all else f" in {now - self._began:.0f} s"
        self._tell(f"{self._num} of {self._num_all} results{failed}{left}")


async def _answers(
    results: AsyncIterator[dict[str, Any]], lines: dict[str, BatchLine]
) -> AsyncIterator[dict[str, Any]]:
    """Yield results as they are, and those of a file of OpenAI's as its lines of output, each when it is complete."""
    import msgspec

    from gateway.batches.line import output_line
    from shared.messages import BatchResult

    async for result in results:
        line = lines.get(result["id"])
        if line is None:
            yield result
            continue
        line.results[result["id"]] = msgspec.convert(result, BatchResult)
        if line.is_complete:
            yield output_line(line)


command = settings_command(PublishConfig, "publish", run, [click.Argument(["prompt"], required=False)])
