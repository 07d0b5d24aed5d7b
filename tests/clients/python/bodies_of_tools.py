"""The bodies of six tools, sent as they send them: `bodies.json` says where each comes from. A feature is one tool."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cells import KEY, MODEL, URL, run

BODIES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "bodies.json").read_text())["bodies"]


def send(sent: dict[str, Any]) -> None:
    body = {**sent["body"], **({"model": MODEL} if "model" in sent["body"] else {})}
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    path = sent["path"].format(model=MODEL)
    request = urllib.request.Request(f"{URL}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    if body.get("stream"):
        assert text.rstrip().endswith(("data: [DONE]", "}")), text[-500:]
        assert '"error":{' not in text, text[-500:]
    else:
        assert "usage" in json.loads(text), text[-500:]


def send_all(client: str) -> None:
    """Send all bodies of a tool."""
    for sent in BODIES:
        if sent["client"] == client:
            try:
                send(sent)
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{sent['sends']}: {error.read().decode()}") from None


CELLS: dict[str, Callable[[], None]] = {
    f"bodies of {client}": partial(send_all, client) for client in dict.fromkeys(sent["client"] for sent in BODIES)
}

if __name__ == "__main__":
    run(CELLS)
