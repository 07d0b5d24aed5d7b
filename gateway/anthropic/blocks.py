"""The blocks of a message's content, as events of a stream or as one list."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from gateway.anthropic.dialect import event

_decode = msgspec.json.Decoder().decode

# Clients give back only thinking that has a signature, and take an empty one for none. Nothing is signed here.
_SIGNATURE = "unsigned"

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def tool_use(name: str) -> dict[str, Any]:
    """Return the block of a call whose arguments follow."""
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}


class BlockEvents:
    """Events of the blocks of a stream. One block is open at a time, and each has a number."""

    def __init__(self) -> None:
        """Begin before the first block."""
        self._index = -1
        self._open: str | None = None

    def text(self, text: str) -> bytes:
        """Return the events of more text."""
        return self._within("text") + self._delta({"type": "text_delta", "text": text})

    def thinking(self, text: str) -> bytes:
        """Return the events of more thinking."""
        return self._within("thinking") + self._delta({"type": "thinking_delta", "thinking": text})

    def call(self, name: str) -> bytes:
        """Return the events of a call that begins."""
        return self.close() + self._start(tool_use(name))

    def arguments(self, text: str) -> bytes:
        """Return the event of more of a call's arguments."""
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> bytes:
        """Return the end of the block that is open, if one is."""
        if self._open is None:
            return b""
        is_thinking, self._open = self._open == "thinking", None
        signature = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if is_thinking else b""
        return signature + event({"type": "content_block_stop", "index": self._index})

    def _within(self, kind: str) -> bytes:
        return b"" if self._open == kind else self.close() + self._start(_EMPTY[kind])

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = block["type"]
        return event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})


class BlockList:
    """Collects the blocks of a whole message."""

    def __init__(self) -> None:
        """Begin empty."""
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def text(self, text: str) -> None:
        """Take more text."""
        self._add("text", text)

    def thinking(self, text: str) -> None:
        """Take more thinking."""
        self._add("thinking", text)

    def call(self, name: str) -> None:
        """Learn that a call begins."""
        self._complete()
        self._blocks.append(tool_use(name))

    def arguments(self, text: str) -> None:
        """Take more of a call's arguments."""
        self._texts.append(text)

    def blocks(self) -> list[dict[str, Any]]:
        """Return all blocks; nothing follows. A call that was cut off in its arguments has an empty input."""
        self._complete()
        return self._blocks

    def _add(self, kind: str, text: str) -> None:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._complete()
            self._blocks.append(dict(_EMPTY[kind]))
        self._texts.append(text)

    def _complete(self) -> None:
        """Put the text that was collected into the last block."""
        if not self._blocks:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts.clear()
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
            if block["type"] == "thinking":
                block["signature"] = _SIGNATURE


def _object(text: str) -> Any:
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
