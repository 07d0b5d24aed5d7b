"""What all chunks of a streamed answer have in common, and a whole answer too."""

from __future__ import annotations

import time
from os import urandom
from typing import Any

from msgspec import Struct

from gateway.generation import Generation, Kind


class AnswerIdentity(Struct, frozen=True):
    """Id, format, model and time of an answer; `created` is in Unix seconds, `fingerprint` names the model's files."""

    id: str
    kind: Kind
    model: str
    created: int
    fingerprint: str | None = None

    @classmethod
    def new(cls, generation: Generation, fingerprint: str | None = None) -> AnswerIdentity:
        """Identify a new answer; its id has the prefix that its endpoint's clients know."""
        prefix = "chatcmpl-" if generation.kind == "chat" else "cmpl-"
        return cls(prefix + urandom(12).hex(), generation.kind, generation.model, int(time.time()), fingerprint)

    def fields(self, streamed: bool) -> dict[str, Any]:
        """Return the leading fields of the JSON object."""
        name = "text_completion" if self.kind == "completion" else "chat.completion"
        if streamed and self.kind == "chat":
            name += ".chunk"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
