"""`headrace adapter` at an operator's port: what it asks for and prints. The whole way is an integration test."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.cli.adapter import _put
from shared.adapter_files import content_digest, read_content
from shared.errors import ConfigError
from tests.ops.cli.command import headrace_here
from tests.shared.stored_adapters import write_stored

DIGEST = "3fa" + "0" * 61
SHOWN = {"name": "pirate", "tenant": None, "base": "demo", "rank": 8, "bytes": 2_400_000, "digest": DIGEST}


class Operator(http.server.ThreadingHTTPServer):
    """An operator's port that has one adapter, and does not know `gone`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.orders: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Operator

    def do_GET(self) -> None:
        mine = {**SHOWN, "name": "mine", "tenant": "acme", "rank": None, "bytes": None}
        self._answer(200, json.dumps({"adapters": [{**SHOWN, "workers": ["w1", "w2"]}, {**mine, "workers": []}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.orders.append((self.path, body))
        if body["lora_name"] == "gone":
            self._answer(400, json.dumps({"error": {"message": "lora_name: there is no adapter 'gone'."}}))
        else:
            self._answer(200, "Success: LoRA adapter")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def operator() -> Iterator[Operator]:
    with Operator() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _adapter(operator: Operator, *arguments: str, **environ: str) -> tuple[int, str, str]:
    done = headrace_here("adapter", "--operator-url", operator.url, *arguments, **environ)
    return done.returncode, done.stdout, done.stderr


def test_list_shows_whose_names_mean_what_and_where_it_is(operator: Operator) -> None:
    _, out, _ = _adapter(operator, "ls")
    heads, *rows = [line.split() for line in out.splitlines()]
    assert heads == ["NAME", "TENANT", "MODEL", "RANK", "SIZE", "CONTENT", "IN", "MEMORY", "OF"]
    assert rows == [
        ["pirate", "all", "demo", "8", "2.4", "MB", DIGEST[:12], "w1,", "w2"],
        ["mine", "acme", "demo", DIGEST[:12]],
    ]
    assert json.loads(_adapter(operator, "ls", "--json")[1])[0]["digest"] == DIGEST


def test_path_is_the_gateways_unless_this_machine_writes_the_store(operator: Operator, tmp_path: Path) -> None:
    adapter = write_stored(tmp_path / "adapter")
    status, out, _ = _adapter(operator, "add", "pirate", str(adapter))
    assert (status, "w1, w2" in out, "mine" in out) == (0, True, False)
    assert _adapter(operator, "add", "mine", "/of/the/gateway", "--tenant", "acme", "--base", "demo")[0] == 0
    store = tmp_path / "store"
    assert _adapter(operator, "--adapters", str(store), "add", "pirate", str(adapter))[0] == 0
    content = read_content(adapter)
    assert [body for _, body in operator.orders] == [
        {"lora_name": "pirate", "lora_path": str(adapter)},
        {"lora_name": "mine", "lora_path": "/of/the/gateway", "tenant": "acme", "base_model_name": "demo"},
        {"lora_name": "pirate", "lora_content": [content.digest, content.num_bytes, 8]},
    ]
    assert {path for path, _ in operator.orders} == {"/v1/load_lora_adapter"}
    assert content_digest(store / "headrace" / "adapters" / content.digest) == content.digest


def test_what_is_refused_is_one_line(operator: Operator, tmp_path: Path) -> None:
    status, _, told = _adapter(operator, "rm", "gone", "--tenant", "acme")
    assert (status != 0, told.count("\n"), "NAME: there is no adapter 'gone'" in told) == (True, 1, True)
    status, _, told = _adapter(operator, "add", "a", "nothere")
    assert (status, "PATH: nothere does not exist here" in told) == (2, True)
    assert operator.orders == [("/v1/unload_lora_adapter", {"lora_name": "gone", "tenant": "acme"})]
    # The store is written by this machine, which finds no adapter there.
    status, _, told = _adapter(operator, "add", "a", str(tmp_path), HEADRACE_ADAPTERS=str(tmp_path / "store"))
    assert (status != 0, told.count("\n"), "adapter_config.json is missing" in told) == (True, 1, True)
    assert len(operator.orders) == 1


async def test_store_in_a_place_that_does_not_exist_is_refused_and_not_made(tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"there is no .* either"):
        await _put(str(tmp_path / "none" / "store"), directory)
    assert not (tmp_path / "none").exists()


def test_removed_name_is_told(operator: Operator) -> None:
    assert _adapter(operator, "rm", "pirate") == (0, "pirate was removed\n", "")


def test_other_words_for_a_command_are_advised(operator: Operator) -> None:
    for word, meant in (("load", "add"), ("list", "ls"), ("unload", "rm")):
        status, _, told = _adapter(operator, word)
        assert (status, f"Did you mean '{meant}'?" in told) == (2, True)
