"""`headrace` with what most commands import, but none of the packages that only some of them may need."""

from __future__ import annotations

import importlib

from ops.cli import main as run

for name in (
    *("gateway.admission.api_keys", "gateway.batches.line", "shared.nats_connection", "uvloop"),
    *("ops.cli.batch_api", "ops.cli.batch_queue", "ops.cli.chat", "ops.cli.dead"),
    *("ops.cli.dead_letter_box", "ops.cli.group", "ops.cli.keys", "ops.cli.setup", "ops.cli.tenant"),
):
    importlib.import_module(name)

__all__ = ["run"]
