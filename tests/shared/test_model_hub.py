"""Downloads from a small server that speaks the hub's routes, by the real library, in a process with its variables."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest

from shared.errors import ConfigError
from shared.model_hub import hub_id, local_model, model_meant

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"x",
}
PROGRAM = """
import sys, pathlib, shared.errors, shared.model_hub as hub
for name in sys.argv[1:]:
    try:
        print(hub.local_model(pathlib.Path(name), "HEADRACE_MODEL"))
    except shared.errors.ConfigError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """A hub with one model."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        headers, body, status = {}, b"{}", 404
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            status, body = 200, json.dumps(files).encode()
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            status, body = 200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/org/tiny/resolve/") and (name := path.rpartition("/")[2]) in FILES:
            status, body = 200, FILES[name]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def download(home: Path, endpoint: str, *models: str, **environ: str) -> list[str]:
    """Return for each model the folder that it was downloaded to, or the error."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environ}
    command = [sys.executable, "-c", PROGRAM, *models]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_id_is_downloaded_once_and_found_without_a_network_or_is_one_clear_line(endpoint: str, tmp_path: Path) -> None:
    unknown, found = download(tmp_path, endpoint, "org/none", "org/tiny")
    folder = Path(found)
    assert folder.name == COMMIT
    assert {path.name for path in folder.iterdir()} == FILES.keys() - {"pytorch_model.bin"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    again, absent = download(tmp_path, "http://127.0.0.1:1", "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert again == found
    for line in (unknown, absent):
        assert "could not be downloaded from the hub" in line


def test_paths_are_no_ids(tmp_path: Path) -> None:
    assert hub_id(Path("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    assert hub_id(Path("Qwen/Qwen3-0.6B@main")) == "Qwen/Qwen3-0.6B"
    too_long = "a/" + "b" * 5000
    for path in (tmp_path, "/a/b", "./a/b/c", "model", "a/b/c", "../a", "models/a.gguf", "a/b.GGUF", too_long):
        assert hub_id(Path(path)) is None


@pytest.mark.parametrize("revision", ["../../x", "..", "a/../b", "/etc", ".hidden", "a..b", "a/.git"])
def test_revision_that_is_a_way_through_folders_is_refused_before_anything_is_asked(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.import_module", pytest.fail)
    with pytest.raises(ConfigError, match="is not a revision: write a commit, a branch or a tag after the @"):
        local_model(Path(f"org/tiny@{revision}"), "HEADRACE_MODEL")


def test_commits_branches_and_tags_are_revisions(tmp_path: Path) -> None:
    for revision in (COMMIT, "main", "v1.0-rc.2", "refs/pr/1"):
        hub = Mock(snapshot_download=Mock(return_value=tmp_path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "huggingface_hub", hub)
            assert local_model(Path(f"org/tiny@{revision}"), "HEADRACE_MODEL") == tmp_path
        assert hub.snapshot_download.call_args.kwargs["revision"] == revision


@pytest.mark.parametrize(("folders", "question"), [((), ""), (("a",), "; did you mean {}/a?"), (("a", "b"), "")])
def test_only_the_one_model_below_a_folder_is_asked_about(
    folders: tuple[str, ...], question: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert model_meant(tmp_path) == question.format(tmp_path)


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("{}/tiny/config.json", "{}/tiny"),
        ("~/tiny", "{}/tiny"),
        ("~/none", None),
        ("https://example.com/Qwen/Qwen3-0.6B", None),
    ],
)
def test_model_that_is_likely_meant_is_asked_about(
    named: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    question = "" if meant is None else f"; did you mean {meant.format(tmp_path)}?"
    assert model_meant(Path(named.format(tmp_path))) == question
