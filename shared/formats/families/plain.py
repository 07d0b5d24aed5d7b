"""Models that write neither reasoning nor tool calls: all text is content."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat

PLAIN = ChatFormat(name="plain")
