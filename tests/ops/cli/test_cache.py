"""`headrace cache`: what files there are, whether they are whole, and to be rid of them."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.file_store import DirectoryStore
from shared.objects.s3 import bucket_errors
from tests.ops.cli.command import headrace_here

MAKERS = [Maker(weights * 32, (b"a" * 32, b"b" * 32)) for weights in (b"v", b"w")]


@pytest.fixture
def place(tmp_path: Path) -> str:
    store = DirectoryStore(tmp_path)
    for maker in MAKERS:
        for number in range(3):
            payload = memoryview(bytes([number]) * 100)
            digest = bytes([number]) * 32
            for group in range(2):
                store.write(maker.key(group, digest), [maker.header(group, digest, b"", payload), payload])
    return str(tmp_path)


def lines(*arguments: str) -> list[dict[str, object]]:
    done = headrace_here("cache", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def verified(place: str) -> tuple[int, int]:
    """Return how many files there are, and how many of them are damaged."""
    listed = [dict[str, Any](each) for each in lines("ls", "--kv-disk-path", place, "--verify")]
    return sum(each["files"] for each in listed), sum(each["damaged"] for each in listed)


def test_makers_are_listed_with_their_files(place: str) -> None:
    listed = lines("ls", "--kv-disk-path", place)
    assert {(each["maker"], each["group"], each["files"]) for each in listed} == {
        (maker.folder, group, 3) for maker in MAKERS for group in range(2)
    }
    assert {each["weights"] for each in listed} == {"76" * 8, "77" * 8}
    shown = headrace_here("cache", "ls", "--kv-disk-path", place).stdout.splitlines()
    assert shown[0].split() == ["MAKER", "WEIGHTS", "GROUP", "FILES", "BYTES", "LAST", "USED"]
    assert len(shown) == 5


def test_damaged_files_are_counted_when_all_are_read(place: str) -> None:
    assert verified(place) == (12, 0)
    key = MAKERS[0].key(0, bytes([1]) * 32)
    path = Path(place) / key
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    path.rename(path.with_name("00" * 32 + ".kv"))
    (Path(place) / MAKERS[0].key(1, bytes([2]) * 32)).write_bytes(b"")
    assert verified(place) == (12, 2)


def test_files_of_one_maker_or_all_are_deleted(place: str) -> None:
    (done,) = lines("clear", "--kv-disk-path", place, "--maker", MAKERS[0].folder)
    assert done["files"] == 6
    assert {each["maker"] for each in lines("ls", "--kv-disk-path", place)} == {MAKERS[1].folder}
    assert [path.name for path in Path(place).iterdir()] == [MAKERS[1].folder], "an empty folder stays"
    assert headrace_here("cache", "clear", "--kv-disk-path", place).stdout.startswith("deleted 6 files, ")
    assert list(Path(place).iterdir()) == []
    assert lines("ls", "--kv-disk-path", place) == []


def test_a_maker_that_has_no_files_is_named(place: str) -> None:
    done = headrace_here("cache", "clear", "--kv-disk-path", place, "--maker", "zzz")
    assert done.returncode == 2
    assert "is zzz, which has no files there; `headrace cache ls` names the makers that have" in done.stderr
    assert verified(place) == (12, 0)


def test_what_is_no_file_or_of_no_length_is_not_read(place: str) -> None:
    folder = Path(place) / MAKERS[0].key(0, bytes([1]) * 32)
    os.mkfifo(folder.with_name("ab" * 32 + ".kv"))
    folder.with_name("cd" * 32 + ".kv").symlink_to("/dev/zero")
    with folder.with_name("00" * 32 + ".kv").open("wb") as file:
        file.truncate(1 << 40)
    assert verified(place) == (13, 1)


def test_directory_without_files_is_told(tmp_path: Path) -> None:
    done = headrace_here("cache", "ls", "--kv-disk-path", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"there are no files of workers in {tmp_path}\n"


def test_missing_credentials_are_told_as_such() -> None:
    exceptions = pytest.importorskip("obstore.exceptions")
    with pytest.raises(OSError, match="there are no credentials; set AWS_ACCESS_KEY_ID and"), bucket_errors():
        raise exceptions.GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 4 ms - 403")


@pytest.mark.parametrize("command", ["ls", "clear"])
def test_a_bucket_that_refuses_is_a_sentence(command: str) -> None:
    pytest.importorskip("obstore")

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environ = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "REGION": "r"}
    environ |= {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    try:
        named = {f"AWS_{name}": value for name, value in environ.items()}
        done = headrace_here("cache", command, "--kv-disk-path", "s3://bucket/kv", **named)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    assert "the bucket s3://bucket/kv cannot be used: " in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert done.stderr.count("\n") == 1
