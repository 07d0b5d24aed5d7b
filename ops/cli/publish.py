"""`headrace publish`: put batch requests straight onto the queue.

A file with a bad line is refused before anything is published, with an error that lists all bad lines.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import settings_command
from ops.cli.running_system import Endpoint, ServerRefusedError, find_nats, shown_names, tell
from ops.stack.config import DEFAULT_STATE_DIR
from ops.stack.state import ReadyFile, read_ready_file
from shared.config import setting
from shared.errors import BadRequestError, ConfigError
from shared.nats_files import NatsFiles

if TYPE_CHECKING:
    from shared.messages import Request

# Place of a line, and its fields or the reason for their absence.
FoundLine = tuple[str, dict[str, Any] | BadRequestError]
MAX_TOLD = 20


@dataclass(frozen=True, slots=True)
class PublishConfig(NatsFiles):
    """What to publish, where, and whether to wait."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    nats_user: str | None = setting(None, "NATS user of the batch role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    file: Path | None = setting(None, "JSON Lines file with one request a line; `-` reads standard input.")
    model_name: str | None = setting(None, "Name of the model, for requests that name none.", alias="--model")
    tenant: str = setting("default", "Whose requests these are, for requests that do not say.")
    max_tokens: int = setting(64, "Tokens to generate at most, for requests that do not say.", minimum=1)
    temperature: float = setting(1.0, "Temperature, for requests that do not say.", minimum=0, maximum=2)
    seed: int = setting(0, "Seed, for requests that do not say.", minimum=-(2**63), maximum=2**63 - 1)
    queue_unserved: bool = setting(False, "Publish jobs for models that no worker serves now too: they wait for one.")
    wait: bool = setting(False, "Wait for the results and print them.")
    timeout_s: float = setting(3600.0, "How long to wait for the results.", minimum=0.1)


def read_lines(file: Path | None, prompt: str | None) -> Iterator[FoundLine]:
    """Yield each request, or why it is none, after the words that say where it stands in the file.

    Raises:
        ConfigError: The file cannot be read.
    """
    if (file is None) == (prompt is None):
        raise ConfigError("HEADRACE_FILE", "give either a PROMPT or --file")
    if file is None:
        yield "the prompt", {"text": prompt}
        return
    try:
        lines = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError("HEADRACE_FILE", f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("HEADRACE_FILE", f"{file} is not text in UTF-8: {error.reason}") from error
    # Not splitlines(): texts in JSON may hold other ends of lines (U+2028) as they are.
    for number, line in enumerate(lines.removeprefix("\ufeff").split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _fields(line)


def _fields(line: str) -> dict[str, Any] | BadRequestError:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRequestError(f"not JSON: {error}")
    return fields if isinstance(fields, dict) else BadRequestError("not a JSON object")


def read_jobs(config: PublishConfig, model: str | None, found: Sequence[FoundLine]) -> list[Request]:
    """Return the jobs of all lines, of `model` where a line names none.

    Raises:
        ConfigError: Lines cannot be jobs; the message lists them. Or a line needs a model, and none is set.
    """
    requests: list[Request] = []
    places: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for place, fields in found:
        try:
            request = _request(config, model, place, fields)
            if (other := places.setdefault(request.id, place)) != place:
                raise BadRequestError(f"id {request.id[:64]!r} is that of {other} too; each line needs its own")
        except BadRequestError as error:
            problems.append((place, str(error)))
            continue
        requests.append(request)
    if problems:
        raise _refusal(config.file, problems, len(found))
    return requests


def _refusal(file: Path | None, problems: Sequence[tuple[str, str]], num_lines: int) -> ConfigError:
    """Return the error that lists all bad lines, of very many the first."""
    if len(problems) == 1:
        return wrong_file(file, *problems[0])
    told = [f"  {place}: {problem}" for place, problem in problems[:MAX_TOLD]]
    more = [f"  and {len(problems) - MAX_TOLD} more"] if len(problems) > MAX_TOLD else []
    head = f"{len(problems)} of {num_lines} lines are wrong, and nothing is published:"
    return wrong_file(file, "", "\n".join([head, *told, *more]))


def _request(config: PublishConfig, model: str | None, place: str, fields: dict[str, Any] | BadRequestError) -> Request:
    import msgspec

    from shared.field_problem import field_problem
    from shared.messages import Request
    from shared.request_fields import UnknownFieldError, check_fields

    if isinstance(fields, BadRequestError):
        raise fields
    if {"custom_id", "method", "url", "body"} <= fields.keys():
        raise BadRequestError("a line of OpenAI's Batch API, which `headrace batch submit` takes")
    defaults: dict[str, Any] = {"id": secrets.token_hex(12), "tenant": config.tenant, "created": time.time()}
    if model:
        defaults["model"] = model
    sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed}
    given = fields.get("sampling") or {}
    if not isinstance(given, dict):
        raise BadRequestError("'sampling' is invalid: expected object")
    sampling |= given
    try:
        check_fields(fields, Request)
        request = msgspec.convert({**defaults, **fields, "sampling": sampling, "lane": "batch"}, Request)
    except UnknownFieldError as error:
        raise BadRequestError(str(error)) from error
    except msgspec.ValidationError as error:
        if "model" not in defaults | fields:
            raise ConfigError("HEADRACE_MODEL_NAME", f"not set; {place} names no model") from error
        raise BadRequestError(field_problem(error).sentence("the request")) from error
    if [request.text, request.messages, request.token_ids].count(None) != 2:
        raise BadRequestError("give one of text, messages and token_ids")
    _check_names(request)
    try:
        msgspec.msgpack.encode(request)
    except UnicodeEncodeError as error:
        raise BadRequestError(f"a text is not valid Unicode: {error.reason}") from error
    return request


def _check_names(request: Request) -> None:
    """Refuse requests that the worker would refuse or change, before anything is published."""
    from shared.bounds import MAX_JOB_PRIORITY
    from shared.errors import InvalidNameError
    from shared.subjects import encode_name, is_batch_reply, reply_prefix

    for field, name in (("model", request.model), ("tenant", request.tenant)):
        try:
            encode_name(name)
        except InvalidNameError as error:
            raise BadRequestError(f"{field}: {error}") from error
    if request.priority > MAX_JOB_PRIORITY:
        problem = f"priority is {request.priority}, and that of a job is at most {MAX_JOB_PRIORITY}"
        raise BadRequestError(f"{problem}; give jobs that can wait a smaller one")
    if request.reply is not None and not is_batch_reply(request.reply, request.tenant):
        raise BadRequestError(f"reply must begin with {reply_prefix(request.tenant)!r}")


def wrong_file(file: Path | None, place: str, problem: str) -> ConfigError:
    """Return the error for a request, with its place in the file."""
    shown = None if file is None else "standard input" if str(file) == "-" else str(file)
    return ConfigError("HEADRACE_FILE", f"{', '.join(filter(None, (shown, place)))}: {problem}")


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
    roots = _served_models(config, url, running)
    served = None if roots is None else sorted(set(roots.values()))
    model = config.model_name or (served[0] if served and len(served) == 1 else None)
    try:
        requests = read_jobs(config, model, found)
    except ConfigError as error:
        if served is None or error.variable != "HEADRACE_MODEL_NAME":
            raise
        others = f"{len(served)} models are served: {shown_names(served)}; name one"
        told = others if served else "no worker is heard whose model it could be"
        raise ConfigError(error.variable, f"{error.problem}, and {told}") from None
    if roots is not None and served is not None:
        requests = _without_aliases(requests, roots)
        _check_served(config, {request.model for request in requests}, served)
    try:
        return asyncio.run(_publish(config, url, requests))
    except KeyboardInterrupt:
        tell("stopped; published requests still run: publish a file whose lines have ids again to get the results")
        return 130


def _served_models(config: PublishConfig, url: str, running: ReadyFile | None) -> dict[str, str] | None:
    """Return the names that the system serves whose NATS this is, and the model of each; None where none is known."""
    from shared.audit import servers_in

    running = running or read_ready_file(config.state_dir)
    if running is None or servers_in(url) != servers_in(running.nats_url):
        return None
    try:
        return Endpoint(running.url, running.api_key).roots()
    except ServerRefusedError:
        return None


def _without_aliases(requests: list[Request], roots: dict[str, str]) -> list[Request]:
    """Return the requests with the model of each alias: no gateway is on the way of a job that would resolve it."""
    import msgspec

    for alias in sorted({each.model for each in requests if roots.get(each.model, each.model) != each.model}):
        tell(f"{alias[:64]!r} is an alias of {roots[alias][:64]}: its jobs go to that model, none to a canary of it")
    return [msgspec.structs.replace(each, model=roots.get(each.model, each.model)) for each in requests]


def _check_served(config: PublishConfig, models: set[str], served: list[str]) -> None:
    """Refuse models that are not served if the system serves others; while it serves none, jobs may wait."""
    unserved = sorted(models.difference(served))
    names = shown_names(served)
    if unserved and served and not config.queue_unserved:
        problem = f"no worker serves {unserved[0][:64]!r}; served: {names}; with --queue-unserved its jobs wait for one"
        raise ConfigError("HEADRACE_MODEL_NAME", problem)
    wait = "its jobs wait in the queue until one does"
    for model in unserved:
        tell(f"no worker serves {model[:64]!r} now; {wait}; served: {names or 'none'}")


async def _publish(config: PublishConfig, url: str, requests: list[Request]) -> int:
    from ops.cli.batch_client import BatchClient

    async with BatchClient(url, config.nats_user, config.nats_password, config, tell) as client:
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
        tell(f"{failures.total()} of {len(requests)} results are not answers ({counts})")
        return 1


command = settings_command(PublishConfig, "publish", run, [click.Argument(["prompt"], required=False)])
