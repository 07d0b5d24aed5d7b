"""NKeys and JWTs as an operator of NATS makes them with `nk` and `nsc`."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

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
    """Make a JWT by which `issuer` vouches for `subject`."""
    body = {"jti": "x", "iat": 1_700_000_000, "iss": issuer.public, "name": kind, "sub": subject.public}
    body["nats"] = {"type": kind, "version": 2} | claims
    parts = [_encode(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
    return ".".join([*parts, issuer.sign(".".join(parts))])


def write_credentials(file: Path, jwt: str, user: Identity) -> None:
    """Write a credentials file as `nsc` does."""
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
