"""Authentication: Bearer keys only, refused by default, reloaded while running."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gateway.admission.api_keys import DEFAULT_READS_PER_MINUTE, create_key, limit_tenant, revoke_key
from gateway.admission.auth import CHECK_INTERVAL_S, KeyStore, Principal, check_auth_settings
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from shared.errors import ConfigError
from tests.clock import Clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", b"Bearer " + key.encode())]


def refused(store: KeyStore, headers: list[tuple[bytes, bytes]]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        store.authenticate(headers)
    assert caught.value.status == 401
    return caught.value


def test_key_opens_its_tenant_and_limits(path: Path) -> None:
    record, key = create_key(path, tenant="acme", models=("a", "b"), requests_per_minute=5, tokens_per_minute=6)
    principal = KeyStore(path, None, GatewayMetrics()).authenticate(bearer(key))
    assert principal == Principal(record.id, "acme", frozenset({"a", "b"}), 5, 6, None, DEFAULT_READS_PER_MINUTE, 0)
    assert not principal.is_unlimited
    principal.check_model("a")
    with pytest.raises(ApiError) as caught:
        principal.check_model("c")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_key_of_a_head_that_comes_again_is_refused_once_it_is_revoked(path: Path, clock: Clock) -> None:
    record, key = create_key(path, tenant="a")
    store, notes = KeyStore(path, None, GatewayMetrics(), clock), dict[str, str]()
    assert store.authenticate(bearer(key), notes) == store.authenticate(bearer(key), notes)
    revoke_key(path, record.id)
    clock.now += CHECK_INTERVAL_S
    with pytest.raises(ApiError) as caught:
        store.authenticate(bearer(key), notes)
    assert caught.value.status == 401
    assert key not in "".join(notes.values())


def test_bootstrap_key_is_unlimited_and_of_the_default_tenant() -> None:
    principal = KeyStore(None, "secret", GatewayMetrics()).authenticate(bearer("secret"))
    assert (principal.tenant, principal.models, principal.is_unlimited) == ("default", None, True)
    principal.check_model("anything")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Basic secret")],
        [(b"authorization", b"Bearer Secret")],
        [(b"authorization", b"Bearer secret2")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer " + b"x" * 100_000)],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Secret")],
        [(b"x-api-key", b"secret"), (b"x-api-key", b"secret")],
        [(b"x-api-key", b"x" * 100_000)],
        [(b"x-api-key", b"secret"), (b"authorization", b"Bearer other")],
        [(b"x-api-key", b"other"), (b"authorization", b"Bearer secret")],
        [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer secret")],
    ],
)
def test_anything_but_one_valid_key_is_a_401(headers: list[tuple[bytes, bytes]]) -> None:
    error = refused(KeyStore(None, "secret", GatewayMetrics()), headers)
    assert error.code == "invalid_api_key"
    assert b"www-authenticate" in dict(error.response_headers())


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ((b"authorization", b"Bearer "), "variable that it comes from may be empty"),
        ((b"authorization", b"secret"), "must be `Bearer <key>`"),
        ((b"authorization", b"Bearer other"), "api_key in its state directory"),
        ((b"authorization", b"Bearer other"), "knows none like that in `Authorization`"),
        ((b"x-api-key", b"other"), "knows none like that in `x-api-key`"),
        ((b"x-api-key", b"other"), "`headrace keys create`"),
        ((b"x-goog-api-key", b"secret"), "as `Authorization: Bearer <key>` or as `x-api-key: <key>`"),
    ],
)
def test_refusal_says_what_to_do(header: tuple[bytes, bytes], told: str) -> None:
    assert told in refused(KeyStore(None, "secret", GatewayMetrics()), [header]).message


def test_key_may_stand_in_either_header_or_in_both_and_its_scheme_in_any_case() -> None:
    store = KeyStore(None, "secret", GatewayMetrics())
    assert store.authenticate([(b"x-api-key", b"secret")])
    assert store.authenticate([(b"x-api-key", b"secret"), (b"authorization", b"Bearer secret")])
    assert store.authenticate([(b"api-key", b"secret")])
    assert store.authenticate([(b"authorization", b"bearer secret")])
    refused(store, [(b"api-key", b"secret"), (b"x-api-key", b"secret")])


def test_key_of_probes_is_known_beside_the_others(path: Path) -> None:
    _, key = create_key(path, tenant="acme")
    store = KeyStore(path, "secret", GatewayMetrics(), probe_key="asking")
    shown = {each: store.authenticate(bearer(each)) for each in (key, "secret", "asking")}
    assert {each: holder.is_probe for each, holder in shown.items()} == {key: False, "secret": False, "asking": True}
    assert shown["asking"].is_unlimited


def test_new_and_revoked_keys_take_effect_within_the_interval(path: Path, clock: Clock) -> None:
    record, first = create_key(path, tenant="a")
    store = KeyStore(path, None, GatewayMetrics(), clock)
    store.authenticate(bearer(first))
    _, second = create_key(path, tenant="b")
    revoke_key(path, record.id)
    refused(store, bearer(second))
    store.authenticate(bearer(first))
    clock.now += CHECK_INTERVAL_S
    assert store.authenticate(bearer(second)).tenant == "b"
    refused(store, bearer(first))


def test_file_is_not_touched_more_than_once_an_interval(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = create_key(path, tenant="a")
    store = KeyStore(path, None, GatewayMetrics(), clock)
    looks: list[Path] = []
    stat = Path.stat

    def counted(self: Path, **options: bool) -> object:
        looks.append(self)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", counted)
    for _ in range(100):
        clock.now += CHECK_INTERVAL_S / 10
        store.authenticate(bearer(key))
    assert {9 <= looks.count(each) <= 11 for each in set(looks)} == {True}


@pytest.mark.parametrize("damage", ["broken", "gone"])
def test_damaged_file_leaves_the_old_keys_in_force_and_is_counted(
    path: Path, clock: Clock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = create_key(path, tenant="a")
    metrics = GatewayMetrics()
    store = KeyStore(path, None, metrics, clock)
    good = path.read_bytes()
    if damage == "broken":
        path.write_bytes(b"[")
    else:
        path.unlink()
    clock.now += CHECK_INTERVAL_S
    assert store.authenticate(bearer(key)).tenant == "a"
    assert (metrics.key_reload_failures, metrics.is_keys_file_unread) == (1, True)
    for _ in range(3):
        # The same damage is not read, told and counted again.
        clock.now += CHECK_INTERVAL_S
        store.authenticate(bearer(key))
    assert metrics.key_reload_failures == 1
    (line,) = caplog.messages
    assert line.startswith("keys not reloaded, the old ones stay in force: ")
    assert str(path) in line
    path.write_bytes(good.replace(b'"a"', b'"z"'))
    clock.now += CHECK_INTERVAL_S
    assert store.authenticate(bearer(key)).tenant == "z"
    assert (metrics.key_reload_failures, metrics.is_keys_file_unread) == (1, False)


def test_expired_key_is_refused_with_the_time_of_its_end(path: Path) -> None:
    now = time.time()
    _, old = create_key(path, tenant="a", expires=now - 1)
    _, new = create_key(path, tenant="a", expires=now + 3600)
    store = KeyStore(path, None, GatewayMetrics())
    assert store.authenticate(bearer(new)).tenant == "a"
    assert refused(store, bearer(old)).message.startswith("This API key has expired (20")


def test_limits_of_a_tenant_are_those_of_all_its_keys_within_the_interval(path: Path, clock: Clock) -> None:
    _, key = create_key(path, tenant="default")
    store = KeyStore(path, "secret", GatewayMetrics(), clock)
    assert store.authenticate(bearer(key)).is_unlimited
    for limits in ({"max_concurrent": 3}, {"max_concurrent": None}):
        limit_tenant(path, "default", limits)
        clock.now += CHECK_INTERVAL_S
        for shown in (key, "secret"):
            principal = store.authenticate(bearer(shown))
            found = None if principal.tenant_limits is None else principal.tenant_limits.max_concurrent
            assert (found, principal.is_unlimited) == (limits["max_concurrent"], limits["max_concurrent"] is None)


def test_limits_that_cannot_be_read_are_told_from_keys(path: Path) -> None:
    path.write_text("[]")
    (path.parent / "tenants.json").write_text("[")
    with pytest.raises(ConfigError, match=f"the tenants beside the key file: {path.parent / 'tenants.json'}, line 1"):
        KeyStore(path, "secret", GatewayMetrics())


def test_key_file_that_is_gone_keeps_its_keys_when_limits_of_tenants_change(path: Path, clock: Clock) -> None:
    _, key = create_key(path, tenant="a")
    store = KeyStore(path, None, GatewayMetrics(), clock)
    path.unlink()
    for most in (3, 4):
        clock.now += CHECK_INTERVAL_S
        assert store.authenticate(bearer(key)).tenant == "a"
        limit_tenant(path, "a", {"max_concurrent": most})


def test_key_file_that_appears_later_is_read(path: Path, clock: Clock) -> None:
    store = KeyStore(path, "secret", GatewayMetrics(), clock)
    _, key = create_key(path, tenant="late")
    clock.now += CHECK_INTERVAL_S
    assert store.authenticate(bearer(key)).tenant == "late"
    assert store.authenticate(bearer("secret")).tenant == "default"


def test_gateway_without_keys_does_not_start(path: Path) -> None:
    for file, advice in (path, f"headrace keys --keys-file {path} create"), (None, "headrace keys create"):
        with pytest.raises(ConfigError, match=re.escape(advice)):
            KeyStore(file, None, GatewayMetrics())
    assert KeyStore(path, "secret", GatewayMetrics())


def test_without_auth_anyone_of_this_machine_is_let_in_and_a_key_still_counts(path: Path) -> None:
    store = KeyStore(path, "sk-mine", GatewayMetrics(), asks_for_key=False)
    nobody = Principal("none", "default")
    for host in (b"127.0.0.1:8000", b"localhost:8000", b"[::1]:8000", b"localhost"):
        assert store.authenticate([(b"host", host)]) == nobody
        assert store.authenticate([(b"host", host), (b"authorization", b"Bearer anything")]) == nobody
    assert store.authenticate(bearer("sk-mine")).key_id == "bootstrap"
    assert KeyStore(None, None, GatewayMetrics(), asks_for_key=False).authenticate([(b"host", b"localhost")]) == nobody


@pytest.mark.parametrize(
    "header",
    [(b"origin", b"https://evil.example"), (b"origin", b"null"), (b"host", b"evil.example:8000"), (b"host", b"\xff")],
)
def test_without_auth_web_pages_still_need_a_key(path: Path, header: tuple[bytes, bytes]) -> None:
    store = KeyStore(path, "sk-mine", GatewayMetrics(), asks_for_key=False)
    headers = [header] if header[0] == b"host" else [(b"host", b"localhost:8000"), header]
    assert "Web pages need an API key" in refused(store, headers).message


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_no_auth_is_allowed_on_loopback_only(host: str, is_allowed: bool) -> None:
    check_auth_settings(asks_for_key=True, host=host)
    if is_allowed:
        check_auth_settings(asks_for_key=False, host=host)
    else:
        with pytest.raises(ConfigError, match=f"HEADRACE_AUTH: .* on loopback only, and HEADRACE_HOST is {host}"):
            check_auth_settings(asks_for_key=False, host=host)
