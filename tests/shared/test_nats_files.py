"""Users that NATS knows by a credentials file or an NKey instead of a password."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys
import pytest

from ops.stack.ports import free_port
from shared import nats_files
from shared.errors import ConfigError, DependencyError
from shared.nats_connection import connect
from shared.nats_files import NatsFiles, identity_options
from tests.ops.cli.command import headrace
from tests.servers import NatsServer

_KINDS = {"user": nkeys.PREFIX_BYTE_USER, "account": nkeys.PREFIX_BYTE_ACCOUNT, "operator": nkeys.PREFIX_BYTE_OPERATOR}


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair: the seed is the secret, `public` the name by which servers know it."""

    seed: str
    public: str

    def sign(self, text: str) -> str:
        return _encode(nkeys.from_seed(bytearray(self.seed.encode())).sign(text.encode()))


def make_identity(kind: str) -> Identity:
    """Make a key pair of a user, an account or an operator."""
    seed = nkeys.encode_seed(os.urandom(32), _KINDS[kind])
    return Identity(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


def make_jwt(kind: str, subject: Identity, issuer: Identity, **claims: Any) -> str:
    body = {"jti": "x", "iat": 1_700_000_000, "iss": issuer.public, "name": kind, "sub": subject.public}
    body["nats"] = {"type": kind, "version": 2} | claims
    parts = [_encode(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
    return ".".join([*parts, issuer.sign(".".join(parts))])


def write_credentials(file: Path, jwt: str, user: Identity) -> None:
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


pytest.importorskip("nkeys")

Start = Callable[..., NatsServer]


def _nkey_server(start: Start, directory: Path, user: Identity) -> NatsServer:
    config = directory / "nkey.conf"
    config.write_text(f'authorization {{ users: [{{ nkey: {user.public} }}, {{ user: "u", password: "p" }}] }}\n')
    return start("-c", str(config))


def _seed_file(directory: Path, seed: str) -> Path:
    file = directory / "seed"
    file.write_text(seed + "\n")
    return file


async def test_nkey_seed_logs_in_and_wins_over_user_and_password(start_nats: Start, tmp_path: Path) -> None:
    user = make_identity("user")
    server = _nkey_server(start_nats, tmp_path, user)
    files = NatsFiles(nats_nkey_seed_file=_seed_file(tmp_path, user.seed))
    client = await connect(server.url, role="worker", name="w", user="u", password="wrong", files=files)
    await client.close()


async def test_unknown_nkey_is_refused_naming_the_settings(start_nats: Start, tmp_path: Path) -> None:
    server = _nkey_server(start_nats, tmp_path, make_identity("user"))
    files = NatsFiles(nats_nkey_seed_file=_seed_file(tmp_path, make_identity("user").seed))
    with pytest.raises(DependencyError, match="HEADRACE_NATS_NKEY_SEED_FILE"):
        await connect(server.url, role="worker", name="w", files=files)


async def test_credentials_file_logs_in_with_the_permissions_of_its_jwt(start_nats: Start, tmp_path: Path) -> None:
    operator, account, user = make_identity("operator"), make_identity("account"), make_identity("user")
    unlimited = {"subs": -1, "conn": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True}
    account_jwt = make_jwt("account", account, operator, limits=unlimited)
    config = tmp_path / "operator.conf"
    config.write_text(
        f"operator: {make_jwt('operator', operator, operator)}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_jwt} }}\n"
    )
    server = NatsServer(tmp_path / "server", ("-c", str(config)))
    # JetStream needs a system account in this mode, and is of no use here.
    server._command = lambda: [word for word in NatsServer._command(server) if word != "-js"]  # type: ignore[method-assign]
    server.start()
    try:
        may_say = {"pub": {"allow": ["said"]}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        write_credentials(tmp_path / "user.creds", make_jwt("user", user, account, **may_say), user)
        refusals: list[str] = []

        async def note(error: Exception) -> None:
            refusals.append(str(error).lower())

        files = NatsFiles(nats_creds_file=tmp_path / "user.creds")
        client = await connect(server.url, role="worker", name="w", files=files, on_error=note)
        heard = await client.subscribe(">")
        await client.publish("said", b"x")
        await client.publish("unsaid", b"x")
        assert (await heard.next_msg(timeout=10)).subject == "said"
        await client.flush()
        assert ["unsaid" in text for text in refusals] == [True]
        await client.close()
        write_credentials(tmp_path / "forged.creds", make_jwt("user", user, make_identity("account")), user)
        files = NatsFiles(nats_creds_file=tmp_path / "forged.creds")
        with pytest.raises(DependencyError, match="HEADRACE_NATS_CREDS_FILE"):
            await connect(server.url, role="worker", name="w", files=files)
    finally:
        server.kill()


def test_unusable_files_are_one_line_each(tmp_path: Path) -> None:
    seed = _seed_file(tmp_path, make_identity("user").seed)
    account = tmp_path / "account"
    account.write_text(make_identity("account").seed)
    junk = tmp_path / "junk"
    junk.write_text("SUAnothing")
    creds = tmp_path / "creds"
    write_credentials(creds, "a.b.c", make_identity("user"))
    url = f"nats://127.0.0.1:{free_port()}"
    for options, problem in [
        (["--nats-creds-file", str(tmp_path / "missing")], "--nats-creds-file: "),
        (["--nats-creds-file", str(seed)], "is not a NATS credentials file"),
        (["--nats-nkey-seed-file", str(tmp_path)], "--nats-nkey-seed-file: "),
        (["--nats-nkey-seed-file", str(junk)], "does not hold an NKey seed"),
        (["--nats-nkey-seed-file", str(account)], "the seed of another kind than a user's"),
        (["--nats-nkey-seed-file", str(seed), "--nats-creds-file", str(creds)], "not both"),
    ]:
        done = headrace("setup", "--nats-url", url, "--timeout-s", "0.5", *options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert problem in done.stderr
        assert "SUA" not in done.stderr.replace("SU and", "")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[nkeys\]'"):
        identity_options(NatsFiles(nats_creds_file=tmp_path / "x"))


def test_key_without_its_certificate_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^HEADRACE_NATS_KEY_FILE: needs HEADRACE_NATS_CERT_FILE"):
        nats_files.tls_context(NatsFiles(nats_key_file=tmp_path / "key.pem"))
