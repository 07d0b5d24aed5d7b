"""Ask the running system over HTTP for one real answer: only that proves that every part works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from shared.errors import DependencyError

ANSWER_TIMEOUT_S = 60.0
NO_WORKER = "no worker has joined yet"
READY = "ready"
_PROMPT = "def "
# A token, or the output of a model that generates none.
_QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": _PROMPT, "max_tokens": 1}),
    ("/v1/embeddings", {"input": _PROMPT}),
    ("/v1/score", {"text_1": _PROMPT, "text_2": _PROMPT}),
)


async def first_generation(
    url: str, api_key: str, tell: Callable[[str], None], answered: set[str]
) -> tuple[str | None, str]:
    """Try to get one answer from every served model: a token, or else a vector or a score.

    Models that answer are added to `answered` and not asked again, since each question would count as a request.
    Returns the name of the first once all have answered, else None, and a description of the missing answers.

    Raises:
        DependencyError: The model refuses the question; retrying would not help.
    """
    try:
        status, answer = await _call(url, "GET", "/v1/models", api_key)
        if status != 200:
            return None, f"/v1/models answers {status}"
        if not answer.get("data"):
            return None, NO_WORKER
        models = [entry["id"] for entry in answer["data"]]
        tell("the first answer")
        for model in models:
            if model in answered:
                continue
            status, answer = await _ask(url, api_key, model)
            if status != 200:
                break
            answered.add(model)
    except ConnectionRefusedError:
        return None, "the gateway does not listen yet"
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        return None, f"the gateway's answer was cut ({error!r})"
    if status != 200:
        reason = f"a first generation answers {status}: {answer.get('error', {}).get('message', '')}"
        if status == 400:
            raise DependencyError(f"the model cannot be used, {reason}")
        return None, reason
    return models[0], READY


async def _ask(url: str, api_key: str, model: str) -> tuple[int, dict[str, Any]]:
    for path, question in _QUESTIONS:
        status, answer = await _call(url, "POST", path, api_key, {"model": model, **question})
        if answer.get("error", {}).get("code") != "unsupported_task":
            break
    return status, answer


async def _call(url: str, method: str, path: str, api_key: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    place = urlsplit(url)
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\nCache-Control: no-cache\r\n"
        "Connection: close\r\n\r\n"
    )
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(head.encode() + payload)
            status_line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [line.split(":", 1)[1] for line in headers if line.lower().startswith("content-length:")]
            content = await reader.readexactly(int(lengths[0])) if lengths else await reader.read()
        finally:
            writer.close()
    return int(status_line.split()[1]), json.loads(content)
