"""Keys from the console: who may make them, refusals, and the audit log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.admission.api_keys import hash_key, list_keys
from gateway.console.keys import ConsoleKeys
from gateway.errors import ApiError


@pytest.mark.parametrize(
    ("file", "audit", "asks_for_key", "missing"),
    [
        ("keys.json", "audit.jsonl", False, "HEADRACE_OPERATOR_KEY"),
        (None, "audit.jsonl", True, "HEADRACE_KEYS_FILE"),
        ("keys.json", None, True, "HEADRACE_AUDIT_FILE"),
    ],
)
async def test_keys_are_made_only_where_the_port_asks_for_a_key_and_actions_are_written_down(
    tmp_path: Path, file: str | None, audit: str | None, *, asks_for_key: bool, missing: str
) -> None:
    paths = [None if name is None else tmp_path / name for name in (file, audit)]
    keys = ConsoleKeys(*paths, asks_for_key=asks_for_key)
    for act in (keys.make(b'{"tenant": "acme"}'), keys.revoke("key_1")):
        with pytest.raises(ApiError, match=missing) as refused:
            await act
        assert refused.value.status == 403
    assert os.listdir(tmp_path) == []


async def test_key_is_what_the_form_says_and_its_content_is_nowhere_else(tmp_path: Path) -> None:
    file, audit = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    keys = ConsoleKeys(file, audit, asks_for_key=True)
    asked = {"tenant": "acme", "name": "laptop", "models": ["m"], "max_concurrent": 3, "expires_days": 2}
    made = await keys.make(json.dumps(asked).encode())
    [record] = list_keys(file)
    assert (record.id, record.sha256) == (made["id"], hash_key(made["key"]))
    assert (record.tenant, record.name, record.models, record.max_concurrent) == ("acme", "laptop", ("m",), 3)
    assert record.expires is not None
    assert record.expires - record.created == pytest.approx(2 * 86400, abs=60)
    assert made["key"] not in audit.read_text() + file.read_text()
    assert await keys.revoke(made["id"]) == {"revoked": [made["id"]]}
    assert not list_keys(file)[0].is_valid(record.created)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (b"{}", "tenant", "^Missing required parameter: 'tenant'[.]$"),
        (b'{"tenant": ""}', "tenant", "^'tenant' is invalid: expected string of length >= 1[.]$"),
        (b'{"tenant": "a\\u001b[2J"}', "tenant", "^'tenant' is invalid"),
        (b'{"tenant": "a", "max_concurrent": 0}', "max_concurrent", "^'max_concurrent' is invalid: .*integer"),
        (b'{"tenant": "a", "expires_days": 99999}', "expires_days", "^'expires_days' is invalid"),
        (b'{"tenant": "a", "weight": 3}', "weight", "^Unknown parameter: 'weight'[.]$"),
        (b"", None, "^The body is empty: send a JSON object[.]$"),
        (b"[" * 5000, None, "^(The body is nested too deeply|The body is invalid)"),
    ],
)
async def test_wrong_field_is_named_and_nothing_is_made(
    tmp_path: Path, body: bytes, param: str | None, told: str
) -> None:
    keys = ConsoleKeys(tmp_path / "keys.json", tmp_path / "audit.jsonl", asks_for_key=True)
    with pytest.raises(ApiError, match=told) as refused:
        await keys.make(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("named", ["laptop", "..", "x" * 5000, "key_"])
async def test_key_is_revoked_by_its_id_alone(tmp_path: Path, named: str) -> None:
    file = tmp_path / "keys.json"
    keys = ConsoleKeys(file, tmp_path / "audit.jsonl", asks_for_key=True)
    for name in ("laptop", "..", "x" * 128):
        await keys.make(json.dumps({"tenant": "acme", "name": name}).encode())
    with pytest.raises(ApiError) as refused:
        await keys.revoke(named)
    assert refused.value.status == 404
    assert all(record.revoked is None for record in list_keys(file))


async def test_unknown_key_is_a_404_and_an_unreadable_file_a_500(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = ConsoleKeys(file, tmp_path / "audit.jsonl", asks_for_key=True)
    with pytest.raises(ApiError, match="there is no key 'key_1'") as unknown:
        await keys.revoke("key_1")
    file.write_text("no list")
    with pytest.raises(ApiError, match="cannot be used") as unreadable:
        await keys.make(b'{"tenant": "acme"}')
    assert (unknown.value.status, unreadable.value.status) == (404, 500)
