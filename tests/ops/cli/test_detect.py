"""`headrace keys watermark` and `headrace detect`."""

from __future__ import annotations

import json
from pathlib import Path

from ops.stack.config import DEMO_MODEL
from shared.watermark import derived_key
from tests.ops.cli.command import headrace_here as headrace

TEXT = "The river turns the wheel, and the wheel turns the stones that grind the grain of the valley. " * 3


def keys(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    variable = {"HEADRACE_AUDIT_FILE": str(tmp_path / "audit.jsonl")}
    done = headrace("keys", "--keys-file", str(tmp_path / "keys.json"), "watermark", *arguments, **variable)
    return done.returncode, done.stdout, done.stderr


def test_secret_is_made_once_kept_to_its_owner_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "watermarks.json"
    status, out, err = keys(tmp_path, "acme")
    assert (status, out) == (0, "")
    (record,) = json.loads(file.read_text())
    assert file.stat().st_mode & 0o077 == 0
    assert "from now on" in err
    status, out, err = keys(tmp_path, "acme", "--model", "m")
    assert out.strip() == derived_key(record["secret"], "m")
    assert record["secret"] not in out + err + (tmp_path / "audit.jsonl").read_text()
    assert json.loads(file.read_text()) == [record]
    assert "answers are not marked" in keys(tmp_path, "acme", "--remove")[1]
    assert json.loads(file.read_text()) == []
    status, _, err = keys(tmp_path, "acme", "--remove", "--model", "m")
    assert status == 2
    assert "--remove" in err


def test_text_of_a_file_or_of_standard_input_has_a_p_value(tmp_path: Path) -> None:
    key_file, text = tmp_path / "key", tmp_path / "text"
    key_file.write_text(keys(tmp_path, "acme", "--model", "m")[1])
    text.write_text(TEXT)
    options = ("--model", str(DEMO_MODEL), "--key-file", str(key_file))
    told = headrace("detect", str(text), *options)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("p-value ")
    found = json.loads(headrace("detect", *options, "--json", given=TEXT).stdout)
    assert found.keys() == {"tokens", "scored", "score", "p_value", "log10_p"}
    assert 1e-6 < found["p_value"] <= 1
    assert 0 < found["scored"] <= found["tokens"] - 4
    assert f"{found['scored']} of {found['tokens']} tokens scored" in told.stdout
