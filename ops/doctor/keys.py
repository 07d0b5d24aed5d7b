"""Whether gateways can read the key file: one that runs keeps the keys it has, and one that starts does not start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gateway.admission.api_keys import list_keys
from gateway.admission.tenant_limits import list_tenants
from ops.doctor.finding import Finding, problem
from ops.stack.state import keys_file_of
from shared.errors import ConfigError


def key_findings(named: Path | None, state_dir: Path) -> Iterator[Finding]:
    """Yield what is to say of the key file that was named, or of a state directory's, which may have none."""
    path = named or keys_file_of(state_dir)
    if not path.exists():
        if named is not None:
            yield problem("keys", f"{path} does not exist", "`headrace keys create` makes it")
        return
    try:
        records, tenants = list_keys(path), list_tenants(path)
    except ConfigError as error:
        remedy = "mend it, or put a copy back: gateways that run keep the keys they have, and none can start"
        yield problem("keys", error.problem, remedy)
        return
    now = time.time()
    valid = sum(record.is_valid(now) for record in records)
    limited = f"; limits of {len(tenants)} tenants" if tenants else ""
    yield Finding("keys", f"{path}: {valid} of {len(records)} keys are valid{limited}")
