from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from shared.audit import audited, audited_drain, nats_login, servers_in
from shared.errors import ConfigError
from shared.nats_files import NatsFiles


def entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_action_that_is_done_says_who_did_what_and_when(tmp_path: Path) -> None:
    file = tmp_path / "new" / "audit.jsonl"
    with audited(file, "keys.revoke", nats_user="admin", key="key_1") as what:
        what["tenant"] = "acme"
    (entry,) = entries(file)
    assert (entry["action"], entry["outcome"], "error" in entry) == ("keys.revoke", "done", False)
    assert entry["what"] == {"key": "key_1", "tenant": "acme"}
    assert (entry["who"]["uid"], entry["who"]["pid"], entry["who"]["nats_user"]) == (os.getuid(), os.getpid(), "admin")
    assert entry["time"][10:11] + entry["time"][-1] == "TZ"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_user_is_not_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "somebody-else")
    with audited(tmp_path / "a", "setup"):
        pass
    assert entries(tmp_path / "a")[0]["who"]["user"] != "somebody-else"


def test_action_that_fails_is_written_with_its_error_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such key"), audited(tmp_path / "a", "keys.revoke", key="k"):
        raise ValueError("no such key")
    (entry,) = entries(tmp_path / "a")
    assert (entry["outcome"], entry["error"]) == ("failed", "ValueError: no such key")


def test_action_that_is_interrupted_is_written_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), audited(tmp_path / "a", "drain"):
        raise KeyboardInterrupt
    (entry,) = entries(tmp_path / "a")
    assert (entry["outcome"], entry["error"]) == ("failed", "KeyboardInterrupt: ")


def test_nothing_is_done_when_the_log_cannot_be_written(tmp_path: Path) -> None:
    done = []
    with pytest.raises(ConfigError, match="HEADRACE_AUDIT_FILE"), audited(tmp_path, "setup"):
        done.append(1)
    assert done == []


@pytest.mark.parametrize("name", ['x\n{"action":"keys.create","outcome":"done"}', "a\r\nb", "\x1b[2J", "\u2028", '"'])
def test_value_cannot_forge_a_line(tmp_path: Path, name: str) -> None:
    with audited(tmp_path / "a", "keys.create", name=name):
        pass
    text = (tmp_path / "a").read_text()
    assert (text.count("\n"), text.isascii(), text[:-1].isprintable()) == (1, True, True)
    assert entries(tmp_path / "a")[0]["what"] == {"name": name}


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(50):
            with audited(tmp_path / "a", "keys.create", name=str(number) * 500):
                pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(entry["what"]["name"] for entry in entries(tmp_path / "a"))
    assert names == sorted(str(number) * 500 for number in range(8) for _ in range(50))


def test_drain_is_written_and_goes_on_where_it_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drained = []
    for file in (tmp_path / "a", None, tmp_path):
        with caplog.at_level(logging.WARNING), audited_drain(file, "worker.drain", nats_user="worker", timeout_s=5.0):
            drained.append(file)
    assert len(drained) == 3
    assert [entry["what"] for entry in entries(tmp_path / "a")] == [{"timeout_s": 5.0}]
    assert [record.message for record in caplog.records if "audit" in record.message]


def test_error_during_a_drain_is_written_and_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), audited_drain(tmp_path / "a", "worker.drain", nats_user=None, timeout_s=1.0):
        raise RuntimeError("lost")
    assert entries(tmp_path / "a")[0]["outcome"] == "failed"


@pytest.mark.parametrize(
    ("url", "servers", "user"),
    [
        ("nats://admin:secret@a:4222", "a:4222", "admin"),
        ("nats://a:1,nats://u:p@b:2", "a:1,b:2", None),
        ("tls://u:p@b:2", "b:2", "u"),
        ("nats://127.0.0.1:4222", "127.0.0.1:4222", None),
    ],
)
def test_password_in_a_url_is_not_written(url: str, servers: str, user: str | None) -> None:
    assert (servers_in(url), nats_login(None, url, NatsFiles())) == (servers, user)


def test_login_is_the_file_or_else_the_user_as_nats_decides(tmp_path: Path) -> None:
    files = NatsFiles(nats_creds_file=tmp_path / "admin.creds")
    assert nats_login("ann", "nats://bob@a", NatsFiles()) == "ann"
    assert nats_login(None, "nats://bob@a", NatsFiles()) == "bob"
    assert nats_login("ann", "nats://bob@a", files) == f"file {tmp_path / 'admin.creds'}"
    assert nats_login(None, None, NatsFiles(nats_nkey_seed_file=tmp_path / "seed")) == f"file {tmp_path / 'seed'}"
