"""Batch jobs, published as any client of NATS does."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats
from nats.js.errors import NotFoundError

from ops.stack.state import read_ready_file
from shared.streams import RESULTS_STREAM
from shared.subjects import request_subject, result_subject

MODEL = "headrace-demo"


def publish(state_dir: Path, *jobs: dict[str, object], tenant: str = "default", wait: bool = False) -> list[Any]:
    """Publish jobs, of the demo model where they name none; return their results where they are waited for."""
    running = read_ready_file(state_dir)
    assert running is not None
    whole = [{"id": secrets.token_hex(8), "model": MODEL, "tenant": tenant, "lane": "batch", **job} for job in jobs]

    async def run() -> list[Any]:
        # An administrator may publish every tenant's jobs, and read results where they are kept.
        client = await nats.connect(running.admin_nats_url, allow_reconnect=False)
        js, found = client.jetstream(), []
        for job in whole:
            await js.publish(request_subject(str(job["model"]), "batch", tenant), json.dumps(job).encode())
        async with asyncio.timeout(60):
            while wait and len(found) < len(whole):
                with suppress(NotFoundError):
                    subject = result_subject(tenant, str(whole[len(found)]["id"]))
                    found.append(json.loads((await js.get_last_msg(RESULTS_STREAM, subject)).data or b""))
                await asyncio.sleep(0.05)
        await client.close()
        return found

    return asyncio.run(run())
