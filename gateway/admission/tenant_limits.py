"""What all keys of a tenant may do together: a JSON list in `tenants.json`, beside the key file.

Written by `headrace keys limit`; read by the gateways. A tenant without a record there has no limits of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.admission.api_keys import Limit, bound_limits
from gateway.admission.record_file import exclusive, read_records, write_records
from shared.subjects import encode_name


class TenantRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one tenant; None does not limit, and one larger than can be counted is the largest that can."""

    tenant: Annotated[str, Meta(min_length=1, max_length=128)]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None

    def __post_init__(self) -> None:
        """Bound the limits."""
        bound_limits(self)


def tenants_file(keys_file: Path) -> Path:
    """Return where the limits of the tenants are whose keys are in `keys_file`."""
    return keys_file.with_name("tenants.json")


def list_tenants(keys_file: Path) -> list[TenantRecord]:
    """Return the limits of all tenants that have any.

    Raises:
        ConfigError: The file cannot be read or holds something else.
    """
    return read_records(tenants_file(keys_file), TenantRecord, "tenant")


def limit_tenant(keys_file: Path, tenant: str, limits: dict[str, Any]) -> TenantRecord:
    """Replace the limits of a tenant; None in all of them removes its record.

    Raises:
        ConfigError: The file cannot be read or written.
        InvalidNameError: There can be no such tenant.
    """
    encode_name(tenant)
    path, record = tenants_file(keys_file), TenantRecord(tenant=tenant, **limits)
    with exclusive(path):
        others = [each for each in list_tenants(keys_file) if each.tenant != tenant]
        write_records(path, [*others, record] if any(limits.values()) else others)
    return record
