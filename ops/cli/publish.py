"""`headrace publish`: put batch requests straight onto the queue."""

from __future__ import annotations

import asyncio
import difflib
import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import settings_command
from ops.cli.running_system import Endpoint, find_nats
from ops.stack.config import DEFAULT_STATE_DIR
from shared.config import setting
from shared.errors import ConfigError
from shared.nats_files import NatsFiles

if TYPE_CHECKING:
    from shared.messages import Request


# What other interfaces call it: OpenAI's completions, and the lines of its Batch API.
_MEANT = {"prompt": "text", "input": "text", "custom_id": "id", "body": "messages"}


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
    seed: int = setting(0, "Seed, for requests that do not say.")
    wait: bool = setting(False, "Wait for the results and print them.")
    timeout_s: float = setting(3600.0, "How long to wait for the results.", minimum=0.1)


def run(config: PublishConfig, prompt: str | None) -> int:
    """Put batch requests onto the queue.

    Workers run them when no interactive request wants the capacity. Give one PROMPT, or --file with JSON requests, one
    a line: {"text": ...} or {"messages": [...]}, and if wanted "id", "model", "tenant", "priority", "deadline" and
    "sampling". Prints one JSON object a request: where its result will be, or with --wait the result itself as soon as
    it is there.
    """
    found = list(_read(config.file, prompt))
    if not found:
        print(f"headrace: {config.file} has no requests", file=sys.stderr)
        return 0
    url, running = find_nats(config.nats_url, config.state_dir)
    model = config.model_name
    if model is None and running is not None:
        model = next(iter(Endpoint(running.url, running.api_key).models()), None)
    requests = [_request(config, model, place, fields) for place, fields in found]
    return asyncio.run(_publish(config, url, requests))


def _read(file: Path | None, prompt: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each request, after the words that say where it stands in the file."""
    if (file is None) == (prompt is None):
        raise ConfigError("HEADRACE_FILE", "give either a PROMPT or --file")
    if file is None:
        yield "the prompt", {"text": prompt}
        return
    try:
        lines = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except OSError as error:
        raise ConfigError("HEADRACE_FILE", f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("HEADRACE_FILE", f"{file} is not text in UTF-8: {error.reason}") from error
    for number, line in enumerate(lines.splitlines(), start=1):
        if line.strip():
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise ConfigError("HEADRACE_FILE", f"line {number} is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise ConfigError("HEADRACE_FILE", f"line {number} is not a JSON object")
            yield f"line {number}", fields


def _request(config: PublishConfig, model: str | None, place: str, fields: dict[str, Any]) -> Request:
    import msgspec

    from shared.messages import Request

    defaults: dict[str, Any] = {"id": secrets.token_hex(12), "tenant": config.tenant, "created": time.time()}
    if model:
        defaults["model"] = model
    sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed}
    given = fields.get("sampling") or {}
    if not isinstance(given, dict):
        raise ConfigError("HEADRACE_FILE", f"{place}: sampling is not a JSON object")
    _check_known(fields, given, place)
    sampling |= given
    try:
        request = msgspec.convert({**defaults, **fields, "sampling": sampling, "lane": "batch"}, Request)
    except msgspec.ValidationError as error:
        if "model" not in defaults | fields:
            raise ConfigError("HEADRACE_MODEL_NAME", f"not set, and {place} names no model") from error
        raise ConfigError("HEADRACE_FILE", f"{place}: {error}") from error
    if [request.text, request.messages, request.token_ids].count(None) != 2:
        raise ConfigError("HEADRACE_FILE", f"{place}: give one of text, messages and token_ids")
    _check_names(request, place)
    return request


def _check_known(fields: dict[str, Any], sampling: dict[str, Any], place: str) -> None:
    """Refuse a field that nothing reads: it would change the answer that somebody expects."""
    from shared.messages import Request
    from shared.sampling import Sampling

    for name in sampling.keys() - set(Sampling.__struct_fields__):
        raise ConfigError("HEADRACE_FILE", f"{place}: sampling has no field {name[:64]!r}{_meant(name, Sampling)}")
    for name in fields.keys() - {"type", *Request.__struct_fields__}:
        if name in Sampling.__struct_fields__:
            raise ConfigError("HEADRACE_FILE", f'{place}: {name!r} belongs into "sampling": {{"{name}": ...}}')
        raise ConfigError("HEADRACE_FILE", f"{place}: there is no field {name[:64]!r}{_meant(name, Request)}")


def _meant(name: str, struct: type[Any]) -> str:
    close = _MEANT.get(name) or next(iter(difflib.get_close_matches(name, struct.__struct_fields__, 1)), None)
    return "" if close is None else f"; did you mean {close!r}?"


def _check_names(request: Request, place: str) -> None:
    """Refuse names and reply subjects that the worker would refuse, before anything is published."""
    from shared.errors import InvalidNameError
    from shared.subjects import encode_name, is_batch_reply, reply_prefix

    for field, name in (("model", request.model), ("tenant", request.tenant)):
        try:
            encode_name(name)
        except InvalidNameError as error:
            raise ConfigError("HEADRACE_FILE", f"{place}: {field}: {error}") from error
    if request.reply is not None and not is_batch_reply(request.reply, request.tenant):
        prefix = reply_prefix(request.tenant)
        raise ConfigError("HEADRACE_FILE", f"{place}: reply must begin with {prefix!r}")


async def _publish(config: PublishConfig, url: str, requests: list[Request]) -> int:
    from ops.cli.batch_client import BatchClient

    async with BatchClient(url, config.nats_user, config.nats_password, config) as client:
        if not config.wait:
            for request in requests:
                print(json.dumps({"id": request.id, "tenant": request.tenant, "result": await client.publish(request)}))
            return 0
        has_failed = False
        async for result in client.results(requests, config.timeout_s):
            print(json.dumps(result), flush=True)
            has_failed |= result["finish"] in ("failed", "expired", "cancelled")
        return 1 if has_failed else 0


command = settings_command(PublishConfig, "publish", run, [click.Argument(["prompt"], required=False)])
