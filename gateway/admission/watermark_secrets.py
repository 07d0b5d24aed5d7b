"""The secrets of tenants whose answers carry a watermark, in `watermarks.json` beside the key file.

Written by `headrace keys watermark`, read by gateways, which send workers keys that are derived from them for one model
(`shared.watermark`). A file of its own, so that commands of earlier versions, which rewrite limits, leave it alone.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from gateway.admission.record_file import exclusive, read_records, write_records
from shared.subjects import encode_name
from shared.watermark import WatermarkKey

_SECRET_BYTES = 32


class WatermarkRecord(Struct, frozen=True, kw_only=True):
    """A tenant's secret, in hexadecimal. It is never shown: not in logs, nor in what `repr` says."""

    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    secret: WatermarkKey

    def __repr__(self) -> str:
        return f"WatermarkRecord(tenant={self.tenant!r})"


def watermarks_file(keys_file: Path) -> Path:
    """Return where the secrets of the tenants are whose keys are in `keys_file`."""
    return keys_file.with_name("watermarks.json")


def list_watermarks(keys_file: Path) -> dict[str, str]:
    """Return the secrets by tenant.

    Raises:
        ConfigError: The file cannot be read or holds something else.
    """
    records = read_records(watermarks_file(keys_file), WatermarkRecord, "watermark")
    return {record.tenant: record.secret for record in records}


def make_watermark(keys_file: Path, tenant: str) -> tuple[str, bool]:
    """Return the secret of a tenant, and whether it was made just now: from then on the tenant's answers are marked.

    Raises:
        ConfigError: The file cannot be read or written.
        InvalidNameError: There can be no such tenant.
    """
    encode_name(tenant)
    path = watermarks_file(keys_file)
    with exclusive(path):
        known = list_watermarks(keys_file)
        if tenant in known:
            return known[tenant], False
        known[tenant] = secrets.token_hex(_SECRET_BYTES)
        _write(path, known)
    return known[tenant], True


def remove_watermark(keys_file: Path, tenant: str) -> bool:
    """Forget the secret of a tenant, whose texts can then no longer be detected; return whether it had one.

    Raises:
        ConfigError: The file cannot be read or written.
    """
    path = watermarks_file(keys_file)
    with exclusive(path):
        known = list_watermarks(keys_file)
        if known.pop(tenant, None) is None:
            return False
        _write(path, known)
    return True


def _write(path: Path, known: dict[str, str]) -> None:
    write_records(path, [WatermarkRecord(tenant=tenant, secret=secret) for tenant, secret in known.items()])
