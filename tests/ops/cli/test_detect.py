"""`headrace keys watermark` and `headrace detect`."""

from __future__ import annotations

import json
import math
import random
from keyword import kwlist
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.stack.config import DEMO_MODEL
from ops.watermark import detect
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
    digits, owner = out.strip().split(" ", 1)
    assert digits == derived_key(record["secret"], "m")
    assert owner.startswith("tenant acme, since 2")
    assert record["secret"] not in out + err + (tmp_path / "audit.jsonl").read_text()
    assert json.loads(file.read_text()) == [record]
    assert "answers are not marked" in keys(tmp_path, "acme", "--remove")[1]
    assert json.loads(file.read_text()) == []
    assert "answers were and are not marked" in keys(tmp_path, "acme", "--remove")[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("acme", "--remove", "--model", "m"), "--model, --rotate and --remove exclude each other"),
        (("acme", "--rotate", "--remove"), "--model, --rotate and --remove exclude each other"),
        ((), "Name a tenant, or an API key by --key KEY"),
        (("acme", "--key", "phone"), "Name a tenant, or an API key by --key KEY"),
        (("--key", "phone"), "there is no key 'phone'; `headrace keys list` shows them"),
        (("--key", ""), "name a key by its id or name"),
        (("acme", "--rotate"), "tenant acme has no secret to rotate; the same command without --rotate makes one"),
        (("acme", "--model", "m"), "tenant acme has no secret; the same command without --model makes one"),
    ],
)
def test_what_cannot_be_done_is_refused_and_makes_no_secret(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    status, out, err = keys(tmp_path, *arguments)
    assert status != 0
    assert out == ""
    assert told in err
    assert not (tmp_path / "watermarks.json").exists()


def test_key_has_a_secret_beside_that_of_its_tenant(tmp_path: Path) -> None:
    phone, _ = create_key(tmp_path / "keys.json", tenant="acme", name="phone")
    assert f"key {phone.id} of tenant acme: answers are marked from now on" in keys(tmp_path, "--key", "phone")[2]
    own = keys(tmp_path, "--key", phone.id, "--model", "m")[1]
    assert "from now on" in keys(tmp_path, "acme")[2]
    of_tenant = keys(tmp_path, "acme", "--model", "m")[1].splitlines()
    assert own.splitlines() == of_tenant[:1]
    assert [line.split(" ", 1)[1].partition(",")[0] for line in of_tenant] == [
        f"key {phone.id} of tenant acme",
        "tenant acme",
    ]
    told = keys(tmp_path, "acme", "--remove")[1]
    assert told.strip() == f"tenant acme: answers are not marked, but for keys with a secret of their own: {phone.id}"
    keys(tmp_path, "acme")
    assert "answers are marked by the secret of its tenant" in keys(tmp_path, "--key", "phone", "--remove")[1]


def marked_text(key: bytes) -> str:
    """Return a text in which each word is the luckiest of eight by a key."""
    tokenizer = ModelTokenizer(read_model_directory(DEMO_MODEL))
    source, text = random.Random(1), "The"

    def luck(each: str) -> float:
        return detect(tokenizer.encode_text(each, add_special_tokens=False), key).score

    for _ in range(30):
        text = max((f"{text} {word}" for word in source.sample(kwlist, 8)), key=luck)
    return text


def test_text_of_an_earlier_secret_is_told_with_its_dates_and_a_corrected_p_value(tmp_path: Path) -> None:
    # As the file was before secrets were dated.
    (tmp_path / "watermarks.json").write_text(json.dumps([{"tenant": "acme", "secret": "5a" * 32}]))
    old = keys(tmp_path, "acme", "--model", "m")[1]
    text = marked_text(bytes.fromhex(old.split()[0]))
    assert "answers are marked by a new secret from now on" in keys(tmp_path, "acme", "--rotate")[2]
    keys(tmp_path, "acme", "--rotate")
    printed = keys(tmp_path, "acme", "--model", "m")[1]
    assert len({line.split()[0] for line in printed.splitlines()}) == 3
    assert [", until 2" in line for line in printed.splitlines()] == [True, True, False]

    def told(file: str, *options: str) -> str:
        key_file = tmp_path / "key"
        key_file.write_text(file)
        options = ("--model", str(DEMO_MODEL), "--key-file", str(key_file), *options)
        return headrace("detect", *options, given=text).stdout

    alone, of_three = json.loads(told(old, "--json")), json.loads(told(f"{printed}\n{old}", "--json"))
    assert of_three["log10_p"] == pytest.approx(alone["log10_p"] + math.log10(3))
    assert of_three["log10_p"] < -6
    assert (alone["keys_tried"], of_three["keys_tried"]) == (1, 3)
    assert of_three["key"] == printed.splitlines()[0].split(" ", 1)[1]
    assert f"; best of 3 keys, and multiplied by as many: {of_three['key']}" in told(printed)


@pytest.mark.parametrize(
    ("content", "told"), [("", "holds no key;"), ("5a" * 32 + "\n5a\n", "line 2: not a key of 64 hexadecimal digits;")]
)
def test_file_without_good_keys_is_refused(tmp_path: Path, content: str, told: str) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(content)
    done = headrace("detect", "--model", str(DEMO_MODEL), "--key-file", str(key_file), given=TEXT)
    assert done.returncode != 0
    assert told in done.stderr


def test_text_of_a_file_or_of_standard_input_has_a_p_value(tmp_path: Path) -> None:
    key_file, text = tmp_path / "key", tmp_path / "text"
    key_file.write_text("5a" * 32)
    text.write_text(TEXT)
    options = ("--model", str(DEMO_MODEL), "--key-file", str(key_file))
    told = headrace("detect", str(text), *options)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("p-value ")
    found = json.loads(headrace("detect", *options, "--json", given=TEXT).stdout)
    assert found.keys() == {"tokens", "scored", "score", "p_value", "log10_p", "key", "keys_tried"}
    assert found["key"] == "line 1"
    assert 1e-6 < found["p_value"] <= 1
    assert 0 < found["scored"] <= found["tokens"] - 4
    assert f"{found['scored']} of {found['tokens']} tokens scored" in told.stdout
