"""Spellings of a path that clients use: with or without `/v1`, with a slash at the end, and as Azure writes them."""

from __future__ import annotations

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
        """Know the paths of these routes."""
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
    """Return the first part of a path, or `/v1` and the part after it."""
    parts = path.split("/", 3)
    return "/".join(parts[:3] if parts[1:2] == ["v1"] else parts[:2])
