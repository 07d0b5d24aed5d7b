"""Keys that an operator makes and revokes in the console, as `headrace keys` does in a shell on the gateway's host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.admission.api_keys import (
    ALL_MODELS,
    KeyNameTakenError,
    KeyNotFoundError,
    KeyRecord,
    create_key,
    list_keys,
    revoke_key,
)
from gateway.api.schemas.decoding import decode_typed
from gateway.errors import ApiError
from shared.audit import audited
from shared.errors import ConfigError, HeadraceError

Made = TypeVar("Made")

MAX_DAYS = 3650
_PRINTABLE = r"^[^\x00-\x1f\x7f]*\Z"
_Name = Annotated[str, Meta(max_length=128, pattern=_PRINTABLE)]
_Limit = Annotated[int, Meta(ge=1)]


class KeyBody(Struct, forbid_unknown_fields=True):
    """A key to be made; a limit of None does not limit, and no models are all of them."""

    tenant: Annotated[str, Meta(min_length=1, max_length=128, pattern=_PRINTABLE)]
    name: _Name = ""
    models: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=64)] = ()
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent: _Limit | None = None
    expires_days: Annotated[int, Meta(ge=1, le=MAX_DAYS)] | None = None


class ConsoleKeys:
    """Writes the key file of this gateway, with a line in the audit log.

    Args:
        file: None where the gateway has none.
        audit_file: None where actions are not written down; nothing is done then.
        asks_for_key: Whether the operator's port asks for a key; without one, callers cannot be taken for operators.
    """

    def __init__(self, file: Path | None, audit_file: Path | None, *, asks_for_key: bool) -> None:
        self._file = file
        self._audit_file = audit_file
        self._asks_for_key = asks_for_key

    async def make(self, content: bytes) -> dict[str, str]:
        """Make a key from a `KeyBody` in JSON; return its id and the key, which is shown only now.

        Raises:
            ApiError: 400; a field is wrong, or the name is taken. 403; the gateway has no operator's key, key file or
                audit log. 500; a file cannot be written.
        """
        body = decode_typed(KeyBody, content)
        fields = msgspec.structs.asdict(body)
        days = fields.pop("expires_days")
        fields["models"] = body.models or (ALL_MODELS,)
        fields["expires"] = None if days is None else time.time() + days * 86400
        record, key = await self._do("keys.create", fields, lambda file: create_key(file, **fields))
        return {"id": record.id, "key": key}

    async def revoke(self, key_id: str) -> dict[str, list[str]]:
        """Revoke a key, by its id alone, and those that it replaced; return their ids.

        Raises:
            ApiError: 404; there is no such key. 403 and 500 as `make`.
        """

        def revoke(file: Path) -> list[KeyRecord]:
            if not any(record.id == key_id for record in list_keys(file)):
                raise KeyNotFoundError(key_id[:64])
            return revoke_key(file, key_id)

        records = await self._do("keys.revoke", {"key": key_id[:64]}, revoke)
        return {"revoked": [record.id for record in records]}

    async def _do(self, action: str, what: dict[str, Any], act: Callable[[Path], Made]) -> Made:
        file, audit_file = self._file, self._audit_file
        if not self._asks_for_key:
            raise _forbidden("Start the gateway with HEADRACE_OPERATOR_KEY: without one, anyone here could make keys.")
        if file is None or audit_file is None:
            missing = "HEADRACE_KEYS_FILE" if file is None else "HEADRACE_AUDIT_FILE"
            raise _forbidden(f"This gateway was started without {missing}; `headrace keys` makes and revokes keys.")

        def audited_act() -> Made:
            with audited(audit_file, action, keys_file=file, at="console", **what):
                return act(file)

        try:
            return await asyncio.to_thread(audited_act)
        except KeyNotFoundError as error:
            raise ApiError(404, f"{error}.", code="key_not_found") from None
        except ConfigError as error:
            message = f"The key file or the audit log cannot be used: {error}"
            raise ApiError(500, message, code="keys_unreadable") from None
        except HeadraceError as error:
            param = "name" if isinstance(error, KeyNameTakenError) else "tenant"
            raise ApiError(400, f"{error}.", param=param, code="invalid_value") from None


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden")
