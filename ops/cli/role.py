"""`headrace role`: a worker computes prompts, goes on with those of others, or does both."""

from __future__ import annotations

import click

from ops.cli.options import settings_command
from ops.cli.worker_orders import OrderConfig, give_order
from shared.disaggregation import ROLES


def run(config: OrderConfig, worker: str, role: str) -> int:
    """Give a running worker a role.

    ROLE is prefill (it hands requests over with their first token), decode (it goes on with them) or both. WORKER is
    the name that `headrace doctor` and the metrics show; it was started with --role. What it has begun it finishes as
    before. Its restart brings back the role of --role. Needs an administrator's credentials.
    """
    give_order(config, worker, f"role {role}".encode(), "role")
    click.echo(f"{worker} has the role {role}")
    return 0


_ARGUMENTS = [click.Argument(["worker"]), click.Argument(["role"], type=click.Choice(ROLES))]
command = settings_command(OrderConfig, "role", run, _ARGUMENTS)
