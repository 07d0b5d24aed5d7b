"""The `encrypted_content` of reasoning and summary items, which a client returns with its next request.

It is the text, encrypted and authenticated with a key derived from the operator's secret, for one tenant, model and
kind of item. So only gateways with the same secret can read it. Content that was changed, or made for another tenant,
model or kind, or by another provider, is refused. The same text of the same item always encrypts to the same bytes,
because any gateway may send the events of a background response again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from nacl.exceptions import CryptoError
from nacl.secret import Aead

from gateway.config import read_secrets
from gateway.errors import ApiError
from gateway.responses.body import ItemBody, PartBody

SealKind = Literal["reasoning", "compaction"]

Seal = Callable[[SealKind, str, str], str]
"""Encrypts a text for one tenant and model; its kind and the id of its item come first."""

_PREFIX = "hr2."
_SHOWN_CHARACTERS = 12


class ReasoningSeals:
    """Encrypts with the first of the operator's secrets, and decrypts with any. Keeps nothing else."""

    def __init__(self, secrets: Sequence[str]) -> None:
        """Make keys of these secrets, of which there is at least one."""
        self._boxes = [Aead(_key(secret, b"reasoning key 1")) for secret in secrets]
        self._nonce_key = _key(secrets[0], b"reasoning nonce1")

    @classmethod
    def read(cls, setting: str | None) -> ReasoningSeals | None:
        """Return the seals of a setting, comma-separated secrets, None if empty; `ConfigError` for a short secret."""
        secrets = read_secrets(setting)
        return cls(secrets) if secrets else None

    def seal(self, tenant: str, model: str, kind: SealKind, item_id: str, text: str) -> str:
        """Return the text of an item, encrypted for a tenant, model and kind."""
        owner, plain = _bound_to(tenant, model, kind), text.encode()
        # Never the same for two texts: a nonce made of the text itself needs no memory and no chance.
        nonce = hashlib.blake2b(key=self._nonce_key, digest_size=Aead.NONCE_SIZE)
        nonce.update(_with_lengths(owner, item_id.encode(), plain))
        sealed = self._boxes[0].encrypt(plain, owner, nonce.digest())
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode()

    def open(self, tenant: str, model: str, kind: SealKind, content: str) -> str | None:
        """Return the text that was encrypted for a tenant, model and kind; None if this is none, or was changed."""
        prefix, packed = content[: len(_PREFIX)], content[len(_PREFIX) :]
        try:
            sealed = base64.b64decode(packed, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if prefix != _PREFIX or len(sealed) < Aead.NONCE_SIZE + Aead.MACBYTES:
            return None
        for box in self._boxes:
            try:
                return box.decrypt(sealed, _bound_to(tenant, model, kind)).decode()
            except CryptoError:
                continue
        return None


def opened(
    items: Sequence[ItemBody], where: str, kind: SealKind, tenant: str, model: str, seals: ReasoningSeals | None
) -> list[ItemBody]:
    """Return items of the field `where` with those of a kind decrypted; `ApiError` 400 that names one at fault.

    Summaries keep their encrypted form beside their text, and reasoning does not.
    """
    found = list(items)
    for index, item in enumerate(items):
        if item.type == kind and (sealed := item.encrypted_content) is not None:
            content = _opened(sealed, f"{where}.[{index}]", kind, tenant, model, seals)
            kept = None if kind == "reasoning" else sealed
            found[index] = msgspec.structs.replace(item, content=content, encrypted_content=kept)
    return found


def _opened(
    content: str, where: str, kind: SealKind, tenant: str, model: str, seals: ReasoningSeals | None
) -> list[PartBody]:
    text = None if seals is None else seals.open(tenant, model, kind, content)
    if text is None:
        shown = f"{content[:_SHOWN_CHARACTERS]}..." if content else ""
        message = (
            f"The encrypted content '{shown}' of '{where}' could not be verified: it was "
            f"changed, or was not made by this server for this tenant, as {kind}, by the model '{model[:128]}'. Send "
            "the item as you got it and to the same model, or leave it out."
        )
        raise ApiError(400, message, param=f"{where}.encrypted_content", code="invalid_encrypted_content")
    return [PartBody(type="reasoning_text", text=text)]


def _bound_to(tenant: str, model: str, kind: SealKind) -> bytes:
    return _with_lengths(tenant.encode(), model.encode(), kind.encode())


def _with_lengths(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _key(secret: str, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=Aead.KEY_SIZE, person=purpose).digest()
