"""`headrace cordon`: a worker takes no more requests, and stays."""

from __future__ import annotations

import click

from ops.cli.options import settings_command
from ops.cli.worker_orders import OrderConfig, give_order


def run(config: OrderConfig, worker: str) -> int:
    """Cordon a worker: it takes no more requests, and stays.

    It finishes those that it has begun, and keeps its model, its caches and its connection; `headrace uncordon WORKER`
    lets it take requests again, and so does its restart. WORKER is the name that `headrace doctor` and the metrics
    show. Requests that it has begun end there, however long they take: `headrace drain` hands them over. Needs an
    administrator's credentials.
    """
    give_order(config, worker, b"cordon")
    click.echo(f"{worker} takes no more requests")
    return 0


command = settings_command(OrderConfig, "cordon", run, [click.Argument(["worker"])])
