"""What a 404 says to do: which path is meant, or what stands for a path that other servers have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import MappingProxyType

_BASE_URL = "Check the client's base URL: for OpenAI's libraries it ends in /v1, for Anthropic's with the port."
_DESCRIPTION = "GET /openapi.json describes what is served."

# A longer path is nobody's typing error, and comparing it would cost time.
_MAX_COMPARED_CHARACTERS = 64
_MIN_LIKENESS = 0.85

# What is said, and the first part of the path, or the first two, after `/v1` where it begins so.
_INSTEAD = MappingProxyType(
    {
        name: advice
        for advice, names in (
            ("The API begins at /v1: GET /v1/models lists the models, POST /v1/chat/completions asks one.", ("",)),
            (
                "Files of the Batch API are computed by `headrace publish`, and responses with 'background' outlive "
                "their client.",
                ("files", "batches", "messages/batches"),
            ),
            (
                "Go on from a response with 'previous_response_id' of /v1/responses, or send the whole conversation.",
                ("conversations", "assistants", "threads"),
            ),
            ("This server reads and writes text only.", ("images", "audio", "videos")),
            ("Use /v1/chat/completions or /v1/completions.", ("chat", "completion", "generate", "generate_stream")),
            ("Chats are not kept, as /v1/responses are.", ("chat/completions",)),
            ("Use /v1/embeddings.", ("embed", "embedding", "v2/embed")),
            ("How the server does is told by the metrics, at the operator's port.", ("metrics", "slots")),
            ("Use /health/live or /health/ready.", ("healthz", "livez", "readyz")),
            ("Adapters are not served: merge one into the weights of a model.", ("load_lora_adapter",)),
            (
                "Ollama's own API is not served: choose an OpenAI-compatible server in the client, with a base URL "
                "ending in /v1.",
                ("api",),
            ),
        )
        for name in names
    }
)


class UnservedPaths:
    """Knows the paths that are served, and so which of them another one may mean."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Know the paths of all routes."""
        self._paths = tuple(path for path in dict.fromkeys(paths) if "{" not in path)

    def advice(self, path: str) -> str:
        """Return what to do instead of asking for a path that is not served."""
        parts = [part for part in map(str.strip, path.lower().split("/")) if part]
        if (meant := self._at_the_end(parts)) is not None:
            return f"Did you mean {meant}? {_BASE_URL}"
        return _of_another_server(parts) or self._nearest("/".join(["", *parts])) or _DESCRIPTION

    def _at_the_end(self, parts: list[str]) -> str | None:
        """Return the served path that another one ends with, as a base URL of too many parts makes it."""
        for start in range(len(parts)):
            tail = "/".join(["", *parts[start:]])
            for path in (tail, f"/v1{tail}"):
                # Its last word alone says little: `/v1/threads/1/messages` does not mean /v1/messages.
                is_enough = path == tail or path.count("/") > 2 or start == 0 or self._is_served(parts[:start])
                if path in self._paths and is_enough:
                    return path
        return None

    def _is_served(self, parts: list[str]) -> bool:
        path = "/".join(["", *parts])
        return path in ("/v1", *self._paths) or f"/v1{path}" in self._paths

    def _nearest(self, path: str) -> str | None:
        if len(path) > _MAX_COMPARED_CHARACTERS:
            return None
        near = difflib.get_close_matches(path, self._paths, n=1, cutoff=_MIN_LIKENESS)
        return f"Did you mean {near[0]}?" if near else None


def _of_another_server(parts: list[str]) -> str | None:
    """Return what stands for a path that is not served, if it is one that clients of other servers know."""
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    return _INSTEAD.get("/".join(parts[:2])) or _INSTEAD.get("/".join(parts[:1]))
