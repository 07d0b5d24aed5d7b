"""`headrace chat`: talk to a running system from the terminal."""

from __future__ import annotations

import base64
import contextlib
import http.client
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ops.cli.options import VariableOption, as_given, settings_command
from ops.cli.running_system import Endpoint, ServerRefusedError, find_endpoint, only_model, shown_names
from ops.stack.config import DEFAULT_STATE_DIR
from shared.bounds import MAX_IMAGE_BYTES
from shared.config import setting
from shared.errors import ConfigError
from shared.image_header import ImageProblemError, read_header


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Whom to talk to, and how."""

    url: str | None = setting(None, "Where the system runs; found through the state directory if not given.")
    api_key: str | None = setting(None, "API key; found through the state directory if not given.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    model_name: str | None = setting(None, "Name of the model; the one that is served if not given.", alias="--model")
    max_tokens: int = setting(256, "Tokens to generate at most.", minimum=1)
    temperature: float = setting(0.7, "0 always takes the most likely token.", minimum=0, maximum=2)
    system_prompt: str | None = setting(None, "Instructions that come before the conversation.")


def run(config: ChatConfig, prompt: str | None, images: Sequence[str] = ()) -> int:
    """Talk to a running system.

    Answers appear as they are generated. With PROMPT, continue that text once and exit; with images too, answer once
    about them. Without PROMPT, hold a conversation: images go with its first message, Ctrl-C stops an answer, Ctrl-D
    ends.
    """
    parts = [_image(each) for each in images]
    endpoint = find_endpoint(config.url, config.api_key, config.state_dir)
    try:
        return _talk(config, endpoint, prompt, parts)
    except ServerRefusedError as error:
        error.args = (f"{error}{_remedy(endpoint, error)}",)
        raise


def _talk(config: ChatConfig, endpoint: Endpoint, prompt: str | None, images: list[dict[str, Any]]) -> int:
    model = config.model_name or only_model(endpoint)
    parameters = {"model": model, "max_tokens": config.max_tokens, "temperature": config.temperature}
    opening: list[dict[str, Any]] = (
        [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    )
    if prompt is None:
        _converse(endpoint, parameters, opening, images)
        return 0
    path, asked = "/v1/completions", dict[str, Any](prompt=prompt)
    if images:
        path, asked = "/v1/chat/completions", {"messages": [*opening, _asked(prompt, images)]}
    for text in _texts(endpoint.stream(path, parameters | asked)):
        _show(text)
    _show("\n")
    return 0


def _image(place: str) -> dict[str, Any]:
    """Return the message part for an image file, or for a URL, which the server fetches."""
    if place.startswith(("https://", "http://", "data:")):
        return {"type": "image_url", "image_url": {"url": place}}
    try:
        with open(place, "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            raise ConfigError("HEADRACE_IMAGE", f"{place} has more than {MAX_IMAGE_BYTES} bytes, which no server reads")
        mime = read_header(data).mime
    except OSError as error:
        raise ConfigError("HEADRACE_IMAGE", f"{place} cannot be read: {error.strerror}") from error
    except ImageProblemError as error:
        raise ConfigError("HEADRACE_IMAGE", f"{place} {error}") from error
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _asked(text: str, images: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the user, with images before the text."""
    return {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}


def _remedy(endpoint: Endpoint, error: ServerRefusedError) -> str:
    if error.status == http.client.UNAUTHORIZED:
        return " Give yours as HEADRACE_API_KEY; it is sent as `Authorization: Bearer <key>`."
    if error.code != "model_not_found":
        return ""
    try:
        names = list(endpoint.roots())
    except ServerRefusedError:
        return ""
    if not names:
        return " No worker has joined yet, so there is none."
    return f" Here that is {shown_names(names)}; name it as HEADRACE_MODEL_NAME."


def _converse(
    endpoint: Endpoint, parameters: dict[str, Any], messages: list[dict[str, Any]], images: list[dict[str, Any]]
) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history
    # Ctrl-C belongs to the conversation, even if the parent process ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"{parameters['model']} at {endpoint.url}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while (text := _ask()) is not None:
        if not text.strip():
            continue
        messages.append(_asked(text, images))
        images = []
        answer = _answer(endpoint, {**parameters, "messages": messages})
        if answer is None:
            # Sent again with the next message, an image that was refused would be refused again.
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(endpoint: Endpoint, body: dict[str, Any]) -> str | None:
    parts: list[str] = []
    try:
        for text in _texts(endpoint.stream("/v1/chat/completions", body)):
            parts.append(text)
            _show(text)
    except KeyboardInterrupt:
        # Closing the connection has told the server to stop generating.
        _show(" [stopped]")
    except ServerRefusedError as error:
        print(f"\nheadrace: {error}{as_given(_remedy(endpoint, error))}", file=sys.stderr)
        return None
    _show("\n")
    return "".join(parts)


def _texts(chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
    with contextlib.closing(chunks):  # type: ignore[type-var]
        for chunk in chunks:
            for choice in chunk["choices"]:
                yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def _show(text: str) -> None:
    print(text, end="", flush=True)


_images = VariableOption(
    ["--image", "images"],
    envvar="HEADRACE_IMAGE",
    multiple=True,
    metavar="FILE|URL",
    help="An image for the first message: a file (PNG, JPEG, WebP or GIF), or a URL that the server fetches if it is "
    "allowed to. Give it again for each further image. Files go in the body, of which servers read 32 MB unless set "
    "otherwise: 24 MB for all of them.",
)
command = settings_command(ChatConfig, "chat", run, [click.Argument(["prompt"], required=False), _images])
