"""Prints which server of the NATS cluster leads the queue: `python stream_leader.py`.

Runs on a machine of its own, with the certificates in /etc/headrace/tls and the administrator's login in the variables.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from shared.nats_connection import connect
from shared.nats_files import NatsFiles
from shared.streams import INTERACTIVE_STREAM


async def main() -> None:
    """Ask a server of the cluster."""
    tls = Path("/etc/headrace/tls")
    nats = await connect(
        os.environ["HEADRACE_NATS_URL"],
        role="admin",
        name="stream-leader",
        user=os.environ["HEADRACE_NATS_USER"],
        password=os.environ["HEADRACE_NATS_PASSWORD"],
        files=NatsFiles(
            nats_ca_file=tls / "ca.pem", nats_cert_file=tls / "client.pem", nats_key_file=tls / "client.key"
        ),
    )
    cluster = (await nats.jetstream().stream_info(INTERACTIVE_STREAM)).cluster
    sys.stdout.write((cluster.leader if cluster is not None else None) or "")
    await nats.close()


if __name__ == "__main__":
    asyncio.run(main())
