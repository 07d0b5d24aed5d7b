"""`headrace publish`: put batch requests straight onto the queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click

from ops.cli.options import settings_command
from ops.cli.publish_lines import PublishConfig, read_jobs, read_lines, wrong_file
from ops.cli.running_system import Endpoint, ServerRefusedError, find_nats
from ops.stack.state import ReadyFile, read_ready_file
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.messages import Request

_MAX_NAMES = 10


def run(config: PublishConfig, prompt: str | None) -> int:
    """Put batch requests onto the queue.

    Workers run them when no interactive request wants the capacity. Give one PROMPT, or --file with JSON requests, one
    a line: {"text": ...} or {"messages": [...]}, and if wanted "id", "model", "tenant", "priority", "deadline" and
    "sampling". Prints one JSON object a request: where its result will be, or with --wait the result itself as soon as
    it is there. Files of OpenAI's Batch API are for `headrace batch submit`.
    """
    found = list(read_lines(config.file, prompt))
    if not found:
        raise wrong_file(config.file, "", "no requests: one JSON object a line is expected")
    url, running = find_nats(config.nats_url, config.state_dir, config.tenant)
    served = _served_models(config, url, running)
    model = config.model_name or (served[0] if served and len(served) == 1 else None)
    try:
        requests = read_jobs(config, model, found)
    except ConfigError as error:
        if served is None or error.variable != "HEADRACE_MODEL_NAME":
            raise
        others = f"{len(served)} models are served: {_shown(served)}; name one"
        told = others if served else "no worker is heard whose model it could be"
        raise ConfigError(error.variable, f"{error.problem}, and {told}") from None
    if served is not None:
        _check_served(config, {request.model for request in requests}, served)
    try:
        return asyncio.run(_publish(config, url, requests))
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


async def _publish(config: PublishConfig, url: str, requests: list[Request]) -> int:
    from ops.cli.batch_client import BatchClient

    async with BatchClient(url, config.nats_user, config.nats_password, config, _tell) as client:
        if not config.wait:
            for request in requests:
                told = {"id": request.id, "tenant": request.tenant, "result": await client.publish(request)}
                print(json.dumps(told))
            return 0
        failures: Counter[str] = Counter()
        async for result in client.results(requests, config.timeout_s):
            print(json.dumps(result), flush=True)
            if result["finish"] in ("failed", "expired", "cancelled"):
                failures[result["finish"]] += 1
        if not failures:
            return 0
        counts = ", ".join(f"{number} {failure}" for failure, number in failures.most_common())
        _tell(f"{failures.total()} of {len(requests)} results are not answers ({counts})")
        return 1


command = settings_command(PublishConfig, "publish", run, [click.Argument(["prompt"], required=False)])
