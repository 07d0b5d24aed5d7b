"""A client of resumable streams that keeps the bytes of its events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass
class Reading:
    """One answer.

    Attributes:
        events: Those that have an id, by it, as they came.
        others: Comments, and events about the connection alone.
    """

    response: httpx2.Response
    events: dict[int, bytes] = field(default_factory=dict)
    others: list[bytes] = field(default_factory=list)
    _data: AsyncIterator[bytes] | None = None
    _pending: bytes = b""

    @property
    def stream_id(self) -> str:
        return self.response.headers["x-request-id"]

    async def read(self, num_events: int | None = None) -> Reading:
        """Read until there are so many events with ids, or to the end."""
        self._data = self._data or self.response.aiter_raw()
        while num_events is None or len(self.events) < num_events:
            data = await anext(self._data, b"")
            if not data:
                break
            *events, self._pending = (self._pending + data).split(b"\n\n")
            for event in events:
                self._take(event)
        return self

    def _take(self, event: bytes) -> None:
        event = event.removeprefix(b": keep-alive\n")
        if not event.startswith(b"id: "):
            self.others.append(event)
            return
        number = int(event.removeprefix(b"id: ").partition(b"\n")[0])
        assert number not in self.events, f"event {number} came twice"
        assert not self.events or number == max(self.events) + 1, f"event {number} follows {max(self.events)}"
        self.events[number] = event

    @property
    def objects(self) -> list[dict[str, Any]]:
        """What is in the events, without the mark of the end."""
        data = [event.partition(b"data: ")[2] for event in self.events.values()]
        return [json.loads(each) for each in data if each != b"[DONE]"]

    @property
    def text(self) -> str:
        """The text of a completion or of a chat."""
        choices = [choice for each in self.objects for choice in each.get("choices", ())]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


class Client:
    """Asks one gateway."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any], **headers: str) -> AsyncIterator[Reading]:
        async with self._http() as http, http.stream("POST", path, json=body, headers=headers) as response:
            yield Reading(response)

    @asynccontextmanager
    async def resumed(self, stream_id: str, query: str = "", **headers: str) -> AsyncIterator[Reading]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"/v1/streams/{stream_id}{query}"
        async with self._http() as http, http.stream("GET", url, headers=names) as response:
            yield Reading(response)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of a whole answer."""
        async with self._http() as http:
            response = await http.request(method, path, json=body, headers=headers)
        return response.status_code, response.json() if response.content else None

    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=30)
