"""An HTTP client that shares no code with the product: raw asyncio, one connection a request, all written down."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any, cast

import httptools

from ops.chaos.ledger import Choice, Entry
from ops.chaos.mix import Body

EARLY_ABORT_S = 0.02


def request_bytes(path: str, body: dict[str, Any], key: str, *headers: str) -> bytes:
    """Return a whole POST request; the response cache is left out of it."""
    payload = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: chaos", f"Authorization: Bearer {key}", "Cache-Control: no-cache"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + payload


class StreamClient(asyncio.Protocol):
    """One request on one connection. httptools calls the `on_*` methods."""

    def __init__(self, body: Body, payload: bytes, entry: Entry) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._payload = payload
        self._entry = entry
        self._parser = httptools.HttpResponseParser(self)
        self._is_event_stream = False
        self._pending = b""
        self._num_outputs = 0
        self._now = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._payload)
        if not self._body.is_reading:
            self._transport.pause_reading()
        if self._body.abort_after == 0:
            asyncio.get_running_loop().call_later(random.uniform(0.0, EARLY_ABORT_S), self.abort)

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._entry.error = f"not HTTP: {error}"
            self._finish()
        if self._body.abort_after and self._num_outputs >= self._body.abort_after:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Note an answer that was cut."""
        if not self.done.done():
            self._now = time.monotonic()
            self._entry.is_cut = not self._entry.is_aborted
            self._finish()

    def abort(self) -> None:
        """Leave without a goodbye."""
        if not self.done.done():
            self._entry.is_aborted = True
            self._finish()

    def give_up(self) -> None:
        """Leave an answer that does not end; its entry stays without an end."""
        if not self.done.done():
            self.done.set_result(None)
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the headers that the ledger keeps."""
        match name.lower():
            case b"x-request-id":
                self._entry.request_id = value.decode("latin-1")
            case b"retry-after":
                self._entry.retry_after_s = float(value)
            case b"content-type":
                self._is_event_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._entry.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Read the events that are complete."""
        self._pending += data
        if self._is_event_stream:
            *events, self._pending = self._pending.split(b"\n\n")
            for event in events:
                self._read_event(event)

    def on_message_complete(self) -> None:
        """Read a whole answer, or note that the stream ended within an event."""
        if not self._is_event_stream:
            self._read_whole()
        elif self._pending:
            self._entry.error = "the stream ended within an event"
        self._finish()

    def _read_event(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        content = event.removeprefix(b"data: ")
        if content == b"[DONE]":
            self._entry.num_done += 1
        elif self._entry.num_done:
            self._entry.error = "an event after [DONE]"
        else:
            self._read_object(json.loads(content))

    def _read_whole(self) -> None:
        try:
            content = json.loads(self._pending)
        except ValueError:
            self._entry.error = f"not JSON: {self._pending[:80]!r}"
            return
        self._entry.num_done += 1
        self._read_object(content)

    def _read_object(self, content: dict[str, Any]) -> None:
        if "error" in content:
            self._entry.error = f"{content['error'].get('code')}: {content['error'].get('message')}"
            return
        if content.get("usage"):
            self._entry.completion_tokens = content["usage"]["completion_tokens"]
        for fields in content.get("choices", ()):
            self._read_choice(fields)

    def _read_choice(self, fields: dict[str, Any]) -> None:
        choice = self._entry.choices.setdefault(fields["index"], Choice())
        message = fields.get("delta") or fields.get("message") or fields
        calls = message.get("tool_calls") or ()
        # Of a call only what a model has written: its id is new in each answer.
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        text = message.get("text") or message.get("content") or arguments
        logprobs = fields.get("logprobs") or {}
        tokens = logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or ()]
        if fields.get("finish_reason"):
            choice.finishes.append(fields["finish_reason"])
        elif choice.finishes and (text or tokens):
            self._entry.error = "output after the choice had ended"
        if text or tokens:
            choice.text.append(text)
            choice.tokens += tokens
            self._num_outputs += 1
            self._entry.note_output(self._now)

    def _finish(self) -> None:
        self._entry.end(self._now or time.monotonic())
        if not self.done.done():
            self.done.set_result(None)
        self._transport.abort()


async def ask(body: Body, port: int, key: str, entry: Entry, timeout_s: float) -> None:
    """Make one request of a gateway on loopback, write its `entry`, and wait for its end.

    After `timeout_s`, or when this is cancelled, the entry stays without an end.
    """
    loop = asyncio.get_running_loop()
    payload = request_bytes(body.path, body.json, key)
    try:
        _, client = await loop.create_connection(lambda: StreamClient(body, payload, entry), "127.0.0.1", port)
    except OSError:
        entry.is_cut = True
        entry.end(time.monotonic())
        return
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(client.done)
    except (TimeoutError, asyncio.CancelledError) as ending:
        client.give_up()
        if isinstance(ending, asyncio.CancelledError):
            raise
