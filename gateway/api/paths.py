"""The spellings of a path that clients use, and the advice of a 404: which path is meant, or what replaces it.

A path may stand with or without `/v1`, with a slash at the end, and as Azure writes it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_PREFIX = "/v1"
# Azure's clients put this before what OpenAI's put `/v1` before.
_AZURE = "/openai/"
# The name of a model may have slashes. Clients of Azure's that are given another base URL keep what follows it.
_AZURE_DEPLOYMENT = re.compile(
    r"(?:/openai)?(?:/v1)?/deployments/(?P<model>.{1,512}?)/"
    r"(?P<operation>chat/completions|completions|embeddings|responses)/?"
)
# Cohere's second version is the same for us.
_OTHER_NAMES = {"/v2/rerank": "/v1/rerank"}


def azure_deployment(path: str) -> tuple[str | None, str]:
    """Return the model that a path of Azure's names, and the path without that; any other path as it is."""
    found = _AZURE_DEPLOYMENT.fullmatch(path)
    if found is not None:
        return found["model"], f"{_PREFIX}/{found['operation']}"
    if not path.startswith(_AZURE) or path.startswith(f"{_AZURE}deployments/"):
        return None, path
    rest = path.removeprefix(_AZURE)
    return None, f"/{rest}" if rest.startswith("v1/") else f"{_PREFIX}/{rest}"


class KnownPaths:
    """Finds the route's own spelling of a path. Routes differ in their first part, `/v1` left out."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = frozenset(map(_beginning, paths))

    def route_path(self, path: str) -> str:
        """Return the path as its route spells it, or as it is where no route is meant."""
        if len(path) > 1 and path.endswith("/"):
            path = path[:-1]
        path = _OTHER_NAMES.get(path, path)
        if _beginning(path) in self._known:
            return path
        other = path.removeprefix(_PREFIX) if path.startswith(f"{_PREFIX}/") else _PREFIX + path
        return other if _beginning(other) in self._known else path


def _beginning(path: str) -> str:
    parts = path.split("/", 3)
    return "/".join(parts[:3] if parts[1:2] == ["v1"] else parts[:2])


_BASE_URL = "Check the client's base URL: for OpenAI's libraries it ends in /v1, for Anthropic's with the port."
_DESCRIPTION = "GET /openapi.json describes what is served."

# A longer path is not a typing error, and comparing it would cost time.
_MAX_COMPARED_CHARACTERS = 64
_MIN_LIKENESS = 0.85

# By one of the first parts of a path.
_INSTEAD = {
    "": "The API begins at /v1: GET /v1/models lists the models, POST /v1/chat/completions asks one.",
    "batches": "Batches are OpenAI's: upload a file at /v1/files, and name it at /v1/batches.",
    "threads": "Go on from a response with 'previous_response_id' of /v1/responses, or send the whole conversation.",
    "chat": "Use /v1/chat/completions or /v1/completions. Chats are not kept, as /v1/responses are.",
    "embed": "Use /v1/embeddings.",
    "images": "This server writes text only; images are read, as parts of a conversation.",
    "metrics": "The operator's port has the metrics.",
    "console": "This is the public port; the console is at the operator's, which `headrace up` prints.",
    "healthz": "Use /health/live or /health/ready.",
    "api": "Ollama's own API is not served: choose an OpenAI-compatible server, with a base URL ending in /v1.",
}
_SAME = {"assistants": "threads", "conversations": "threads", "generate": "chat", "audio": "images"}


class UnservedPaths:
    """Knows the paths that are served, and so which of them another one may mean."""

    def __init__(self, paths: Iterable[str]) -> None:
        # A mapping, in the order of the routes.
        self._paths = dict.fromkeys(path for path in paths if "{" not in path)
        self._most_parts = max((path.count("/") for path in self._paths), default=0)

    def advice(self, path: str) -> str:
        """Return what to do instead of asking for a path that is not served."""
        parts = [part for part in map(str.strip, path.lower().split("/")) if part]
        if (meant := self._at_the_end(parts)) is not None:
            return f"Did you mean {meant}? {_BASE_URL}"
        known = (_INSTEAD.get(_SAME.get(part, part)) for part in parts[:3] or [""])
        return next(filter(None, known), None) or self._nearest("/".join(["", *parts])) or _DESCRIPTION

    def _at_the_end(self, parts: list[str]) -> str | None:
        """Return the served path that another one ends with, as a base URL of too many parts makes it."""
        # Only as many parts as a served path has: a path of 8 kB may have four thousand.
        for start in range(max(0, len(parts) - self._most_parts), len(parts)):
            tail = "/".join(["", *parts[start:]])
            for path in (tail, f"/v1{tail}"):
                # Its last word alone says little: `/v1/threads/1/messages` does not mean /v1/messages.
                if path in self._paths and (path == tail or path.count("/") > 2 or self._is_served(parts[:start])):
                    return path
        return None

    def _is_served(self, parts: list[str]) -> bool:
        path = "/".join(["", *parts])
        return path in ("/", "/v1") or path in self._paths or f"/v1{path}" in self._paths

    def _nearest(self, path: str) -> str | None:
        if len(path) > _MAX_COMPARED_CHARACTERS:
            return None
        near = difflib.get_close_matches(path, self._paths, n=1, cutoff=_MIN_LIKENESS)
        return f"Did you mean {near[0]}?" if near else None
