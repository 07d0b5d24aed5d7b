"""What all chunks of a streamed answer have in common, and a whole answer too."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from gateway.generation import Generation, Kind


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
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
        return cls(prefix + secrets.token_hex(12), generation.kind, generation.model, int(time.time()), fingerprint)

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
