"""The key file: what is stored, by whom it can be read, and that writers do not lose each other's keys."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import stat
import time
from pathlib import Path

import msgspec
import pytest

from gateway.admission.api_keys import (
    MAX_LIMIT,
    KeyNameTakenError,
    KeyNotFoundError,
    ReplacedKeyError,
    RevokedKeyError,
    create_key,
    hash_key,
    list_keys,
    list_tenants,
    revoke_key,
    rotate_key,
    tenants_file,
    update_key,
)
from shared.errors import ConfigError, InvalidNameError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


def test_created_key_is_listed_with_its_limits_but_without_itself(path: Path) -> None:
    record, key = create_key(path, tenant="acme", name="ci", models=("m",), requests_per_minute=5, max_concurrent=2)
    assert key.startswith("hr-")
    assert len(key) >= 43
    assert list_keys(path) == [record]
    assert (record.tenant, record.name, record.models, record.requests_per_minute) == ("acme", "ci", ("m",), 5)
    assert record.sha256 == hash_key(key)
    assert key not in path.read_text()


def test_file_is_for_its_owner_alone_and_nothing_else_is_left(path: Path) -> None:
    create_key(path, tenant="a")
    create_key(path, tenant="b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {file.name for file in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}


def test_full_disk_is_told_and_leaves_the_old_keys_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = create_key(path, tenant="a")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"HEADRACE_KEYS_FILE.* cannot be written: No space left on device"):
        create_key(path, tenant="b")
    assert list_keys(path) == [record]
    assert {file.name for file in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}


def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda i: create_key(path, tenant=f"t{i}")[0].id, range(24)))
    assert {record.id for record in list_keys(path)} == set(created)


def test_revoked_key_stays_listed_with_the_time_of_its_end(path: Path) -> None:
    record, _ = create_key(path, tenant="a")
    (revoked,) = revoke_key(path, record.id)
    assert revoked.revoked is not None
    assert list_keys(path) == [revoked]
    assert revoke_key(path, record.id) == [revoked]


def test_mark_of_utf_8_at_the_beginning_is_read_over(path: Path) -> None:
    create_key(path, tenant="t")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [record.tenant for record in list_keys(path)] == ["t"]


def test_key_is_changed_by_id_or_name_and_keeps_the_rest(path: Path) -> None:
    record, key = create_key(path, tenant="a", name="laptop", requests_per_minute=5, tokens_per_minute=9)
    for named in (record.id, "laptop"):
        changed = update_key(path, named, {"requests_per_minute": None, "expires": 7.0})
        assert (changed.requests_per_minute, changed.tokens_per_minute, changed.expires) == (None, 9, 7.0)
    assert list_keys(path) == [changed]
    assert changed.sha256 == hash_key(key)


def test_rotated_key_may_do_the_same_and_the_old_one_ends_soon(path: Path) -> None:
    life_s = 90 * 86400.0
    old, _ = create_key(path, tenant="a", name="laptop", max_concurrent=3, expires=time.time() + life_s)
    new, key = rotate_key(path, "laptop", 60.0)
    kept = list_keys(path)
    assert (new.id != old.id, new.sha256, new.tenant, new.name, new.max_concurrent) == (
        True, hash_key(key), "a", "laptop", 3,
    )  # fmt: skip
    assert new.expires == pytest.approx(time.time() + life_s, abs=5)
    assert (kept[0].id, kept[0].name, kept[1]) == (old.id, "laptop (rotated)", new)
    assert kept[0].expires == pytest.approx(time.time() + 60, abs=5)
    # The name is that of the new one alone.
    assert revoke_key(path, "laptop")[0].id == new.id
    short, _ = create_key(path, tenant="a", name="short", expires=time.time() + 30)
    rotate_key(path, "short", 60.0)
    assert [record.expires for record in list_keys(path) if record.id == short.id] == [short.expires]


def test_revoked_key_ends_those_that_it_replaced_and_that_still_open(path: Path) -> None:
    create_key(path, tenant="a", name="other")
    create_key(path, tenant="a", name="laptop")
    for overlap_s in (60.0, 0.0, 60.0):
        rotate_key(path, "laptop", overlap_s)
    other, first, second, third, last = list_keys(path)
    names = ["laptop (rotated)", "laptop (rotated 2)", "laptop (rotated 3)", "laptop"]
    assert [record.name for record in (first, second, third, last)] == names
    assert [record.id for record in revoke_key(path, "laptop")] == [last.id, third.id, first.id]
    kept = list_keys(path)
    assert [record.name for record in kept if record.is_valid(time.time())] == ["other"]
    # The one that had ended by itself stays as it was.
    assert (kept[0], kept[2]) == (other, second)


def test_old_key_that_is_revoked_leaves_the_one_in_its_place(path: Path) -> None:
    create_key(path, tenant="a", name="laptop")
    new, _ = rotate_key(path, "laptop", 60.0)
    (old,) = revoke_key(path, "laptop (rotated)")
    assert list_keys(path) == [old, new]


def test_key_that_was_replaced_is_not_rotated(path: Path) -> None:
    create_key(path, tenant="a", name="laptop")
    new, _ = rotate_key(path, "laptop", 60.0)
    kept = list_keys(path)
    with pytest.raises(ReplacedKeyError, match=rf"was replaced by {new.id} \(laptop\): rotate that one"):
        rotate_key(path, "laptop (rotated)", 60.0)
    assert list_keys(path) == kept
    revoke_key(path, "laptop")
    assert not any(record.is_valid(time.time()) for record in list_keys(path))


def test_key_that_an_earlier_version_replaced_is_revoked_with_the_one_in_its_place(path: Path) -> None:
    ends = time.time() + 60
    create_key(path, tenant="a", name="laptop")
    rotate_key(path, "laptop", 60.0)
    old, new = list_keys(path)
    neighbour, later = (create_key(path, tenant=tenant, expires=ends)[0] for tenant in "ba")
    neighbour = msgspec.structs.replace(neighbour, name=old.name, created=old.created)
    later = msgspec.structs.replace(later, name=old.name)
    path.write_bytes(msgspec.json.encode([neighbour, old, msgspec.structs.replace(new, replaces=None), later]))
    assert [record.id for record in revoke_key(path, "laptop")] == [new.id, old.id]
    # Those of another tenant, and made later, are other keys.
    assert [record.id for record in list_keys(path) if record.is_valid(time.time())] == [neighbour.id, later.id]


@pytest.mark.parametrize("limit", [MAX_LIMIT + 1, 10**30])
def test_limit_larger_than_can_be_counted_is_the_largest_that_can(path: Path, limit: int) -> None:
    record, _ = create_key(path, tenant="a", tokens_per_minute=5)
    written = path.read_text().replace('"tokens_per_minute": 5', f'"tokens_per_minute": {limit}')
    path.write_text(written)
    tenants_file(path).write_text(f'[{{"tenant": "a", "max_concurrent": {limit}}}]')
    assert list_keys(path) == [msgspec.structs.replace(record, tokens_per_minute=MAX_LIMIT)]
    assert [each.max_concurrent for each in list_tenants(path)] == [MAX_LIMIT]


def test_name_of_several_keys_names_none_of_them(path: Path) -> None:
    # As an earlier version, and a hand, may have written them.
    records = [msgspec.structs.replace(create_key(path, tenant="a")[0], name="same") for _ in range(2)]
    path.write_bytes(msgspec.json.encode(records))
    ids = [record.id for record in records]
    for change in (lambda: revoke_key(path, "same"), lambda: rotate_key(path, "same", 1.0)):
        with pytest.raises(KeyNotFoundError, match=f"2 keys are called 'same'; name one by its id: {', '.join(ids)}"):
            change()
    revoke_key(path, ids[0])
    assert update_key(path, "same", {"name": "one"}).id == ids[1]
    with pytest.raises(RevokedKeyError):
        update_key(path, ids[0], {"name": "revoked"})


def test_revoked_key_is_named_with_the_time_of_its_latest_end(path: Path) -> None:
    times = (1_700_000_000.0, 1_700_086_400.0)
    made = [msgspec.structs.replace(create_key(path, tenant="a")[0], name="ci", revoked=time) for time in times]
    path.write_bytes(msgspec.json.encode(made))
    told = rf"{made[1].id} \(ci\) of tenant a was revoked on 2023-11-15 at 22:13 UTC"
    for change in (lambda: rotate_key(path, "ci", 1.0), lambda: update_key(path, "ci", {"name": "x"})):
        with pytest.raises(RevokedKeyError, match=told):
            change()
    # A key that is not revoked is meant before one that is.
    valid, _ = create_key(path, tenant="a", name="ci")
    assert update_key(path, "ci", {"max_concurrent": 2}).id == valid.id


def test_empty_name_means_no_key(path: Path) -> None:
    create_key(path, tenant="a")
    kept = list_keys(path)
    for change in (lambda: revoke_key(path, ""), lambda: rotate_key(path, "", 1.0), lambda: update_key(path, "", {})):
        with pytest.raises(KeyNotFoundError, match="name a key by its id or name"):
            change()
    assert list_keys(path) == kept


def test_name_that_means_a_key_already_is_refused_until_it_is_revoked(path: Path) -> None:
    first, _ = create_key(path, tenant="a", name="ci")
    for name in ("ci", first.id):
        with pytest.raises(KeyNameTakenError, match=f"means {first.id} of tenant a already"):
            create_key(path, tenant="b", name=name)
    revoke_key(path, "ci")
    with pytest.raises(KeyNameTakenError):
        create_key(path, tenant="b", name=first.id)
    second, _ = create_key(path, tenant="b", name="ci")
    # The name is that of the key that is not revoked.
    assert [record.id for record in revoke_key(path, "ci")] == [second.id]
    # Unnamed keys have no name that could be taken.
    assert len({create_key(path, tenant="b")[0].id for _ in range(2)}) == 2


def test_unknown_key_and_bad_tenant_are_refused(path: Path) -> None:
    with pytest.raises(KeyNotFoundError):
        revoke_key(path, "key_x")
    with pytest.raises(InvalidNameError):
        create_key(path, tenant="")
    assert list_keys(path) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"keys":[]}', b'[{"id":"a","sha256":"x","tenant":"t"}]', b"\xff"])
def test_file_that_is_no_key_file_is_a_config_error(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="HEADRACE_KEYS_FILE"):
        list_keys(path)
    with pytest.raises(ConfigError):
        create_key(path, tenant="a")
    assert path.read_bytes() == content


def test_byte_that_is_not_utf_8_is_told_with_its_line(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'[\n{"id": "a", "name": "caf\xe9"}\n,\n{}\n]\n')
    with pytest.raises(ConfigError, match="line 2: byte 0xe9 is not UTF-8"):
        list_keys(path)
