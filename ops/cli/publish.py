"""`headrace publish`: put batch requests straight onto the queue."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import settings_command
from ops.cli.running_system import Endpoint, ServerRefusedError, find_nats
from ops.stack.config import DEFAULT_STATE_DIR
from shared.config import setting
from shared.errors import BadRequestError, ConfigError
from shared.nats_files import NatsFiles

if TYPE_CHECKING:
    from ops.cli.openai_batch import BatchLine
    from shared.messages import Request


@dataclass(frozen=True, slots=True)
class PublishConfig(NatsFiles):
    """What to publish, where, and whether to wait."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    nats_user: str | None = setting(None, "NATS user of the batch role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    file: Path | None = setting(
        None, "JSON Lines file with one request a line, ours or of OpenAI's Batch API; `-` reads standard input."
    )
    model_name: str | None = setting(None, "Name of the model, for requests that name none.", alias="--model")
    tenant: str = setting("default", "Whose requests these are, for requests that do not say.")
    max_tokens: int = setting(64, "Tokens to generate at most, for requests that do not say.", minimum=1)
    temperature: float = setting(1.0, "Temperature, for requests that do not say.", minimum=0, maximum=2)
    seed: int = setting(0, "Seed, for requests that do not say.")
    wait: bool = setting(False, "Wait for the results and print them.")
    timeout_s: float = setting(3600.0, "How long to wait for the results.", minimum=0.1)


def run(config: PublishConfig, prompt: str | None) -> int:
    """Put batch requests onto the queue.

    Workers run them when no interactive request wants the capacity. Give one PROMPT, or --file with JSON requests, one
    a line: {"text": ...} or {"messages": [...]}, and if wanted "id", "model", "tenant", "priority", "deadline" and
    "sampling". Prints one JSON object a request: where its result will be, or with --wait the result itself as soon as
    it is there. A file of OpenAI's Batch API ({"custom_id", "method", "url", "body"}) gives the lines of its output
    file; --max-tokens, --temperature and --seed do not apply to it.
    """
    found = list(_read(config.file, prompt))
    if not found:
        raise _wrong(config.file, "", "no requests: one JSON object a line is expected")
    url, running = find_nats(config.nats_url, config.state_dir)
    served = None if running is None else _served_models(Endpoint(running.url, running.api_key))
    model = config.model_name or next(iter(served or []), None)
    requests, lines = _jobs(config, model, found)
    if served is not None:
        _tell_unserved({request.model for request in requests}.difference(served))
    try:
        return asyncio.run(_publish(config, url, requests, lines))
    except KeyboardInterrupt:
        _tell("stopped; what is published runs all the same: publish a file whose lines have ids again for its results")
        return 130


def _jobs(
    config: PublishConfig, model: str | None, found: list[tuple[str, dict[str, Any]]]
) -> tuple[list[Request], dict[str, BatchLine]]:
    """Return the jobs of all lines, and by a job's id the line of OpenAI's form that it is of."""
    from ops.cli.openai_batch import is_openai_line

    requests: list[Request] = []
    lines: dict[str, BatchLine] = {}
    places: dict[tuple[str, str], str] = {}
    for place, fields in found:
        if is_openai_line(fields):
            line = _openai_line(config, model, place, fields)
            name = ("custom_id", line.custom_id)
            requests += line.requests
            lines |= dict.fromkeys((request.id for request in line.requests), line)
        else:
            requests.append(_request(config, model, place, fields))
            name = ("id", requests[-1].id)
        if places.setdefault(name, place) != place:
            told = f"{name[0]} {name[1][:64]!r} is that of {places[name]} too; each line needs its own"
            raise _wrong(config.file, place, told)
    return requests, lines


def _served_models(endpoint: Endpoint) -> list[str] | None:
    """Return what a running system serves; None where it does not say."""
    try:
        return endpoint.models()
    except ServerRefusedError:
        return None


def _tell_unserved(models: set[str]) -> None:
    for model in sorted(models):
        _tell(f"no worker serves {model[:64]!r} now; its jobs wait in the queue until one does")


def _tell(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr)


def _read(file: Path | None, prompt: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each request, after the words that say where it stands in the file."""
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
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _wrong(file, f"line {number}", f"not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise _wrong(file, f"line {number}", "not a JSON object")
            yield f"line {number}", fields


def _openai_line(config: PublishConfig, model: str | None, place: str, fields: dict[str, Any]) -> BatchLine:
    from ops.cli.openai_batch import read_openai_line

    try:
        line = read_openai_line(fields, config.tenant, model)
    except BadRequestError as error:
        raise _wrong(config.file, place, str(error)) from error
    _check_names(line.requests[0], config.file, place)
    return line


def _request(config: PublishConfig, model: str | None, place: str, fields: dict[str, Any]) -> Request:
    import msgspec

    from shared.field_problem import field_problem
    from shared.messages import Request
    from shared.request_fields import UnknownFieldError, check_fields

    defaults: dict[str, Any] = {"id": secrets.token_hex(12), "tenant": config.tenant, "created": time.time()}
    if model:
        defaults["model"] = model
    sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed}
    given = fields.get("sampling") or {}
    if not isinstance(given, dict):
        raise _wrong(config.file, place, "'sampling' is invalid: expected object")
    sampling |= given
    try:
        check_fields(fields, Request)
        request = msgspec.convert({**defaults, **fields, "sampling": sampling, "lane": "batch"}, Request)
    except UnknownFieldError as error:
        raise _wrong(config.file, place, str(error)) from error
    except msgspec.ValidationError as error:
        if "model" not in defaults | fields:
            raise ConfigError("HEADRACE_MODEL_NAME", f"not set, and {place} names no model") from error
        raise _wrong(config.file, place, field_problem(error).sentence("the request")) from error
    if [request.text, request.messages, request.token_ids].count(None) != 2:
        raise _wrong(config.file, place, "give one of text, messages and token_ids")
    _check_names(request, config.file, place)
    try:
        msgspec.msgpack.encode(request)
    except UnicodeEncodeError as error:
        raise _wrong(config.file, place, f"a text is not valid Unicode: {error.reason}") from error
    return request


def _check_names(request: Request, file: Path | None, place: str) -> None:
    """Refuse names and reply subjects that the worker would refuse, before anything is published."""
    from shared.errors import InvalidNameError
    from shared.subjects import encode_name, is_batch_reply, reply_prefix

    for field, name in (("model", request.model), ("tenant", request.tenant)):
        try:
            encode_name(name)
        except InvalidNameError as error:
            raise _wrong(file, place, f"{field}: {error}") from error
    if request.reply is not None and not is_batch_reply(request.reply, request.tenant):
        prefix = reply_prefix(request.tenant)
        raise _wrong(file, place, f"reply must begin with {prefix!r}")


def _wrong(file: Path | None, place: str, problem: str) -> ConfigError:
    """Return what is wrong with a request, and where it stands."""
    shown = None if file is None else "standard input" if str(file) == "-" else str(file)
    return ConfigError("HEADRACE_FILE", f"{', '.join(filter(None, (shown, place)))}: {problem}")


async def _publish(config: PublishConfig, url: str, requests: list[Request], lines: dict[str, BatchLine]) -> int:
    from ops.cli.batch_client import BatchClient

    async with BatchClient(url, config.nats_user, config.nats_password, config, _tell) as client:
        if not config.wait:
            for request in requests:
                custom = {"custom_id": lines[request.id].custom_id} if request.id in lines else {}
                told = {"id": request.id, "tenant": request.tenant, "result": await client.publish(request)}
                print(json.dumps({**custom, **told}))
            return 0
        has_failed = False
        async for result in _answers(client.results(requests, config.timeout_s), lines):
            print(json.dumps(result), flush=True)
            has_failed |= result.get("finish") in ("failed", "expired", "cancelled")
            if "custom_id" in result:
                has_failed |= result["response"] is None or result["response"]["status_code"] != 200
        return 1 if has_failed else 0


async def _answers(
    results: AsyncIterator[dict[str, Any]], lines: dict[str, BatchLine]
) -> AsyncIterator[dict[str, Any]]:
    """Yield results as they are, and those of a file of OpenAI's as its lines of output, each when it is complete."""
    import msgspec

    from ops.cli.openai_batch import output_line
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
