"""Batch jobs, published as any client of NATS does."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import nats

from ops.stack.servers import tenant_login
from ops.stack.state import read_ready_file
from shared.subjects import request_subject, result_subject
from shared.urls import with_login

MODEL = "headrace-demo"


def publish(state_dir: Path, *jobs: dict[str, object], tenant: str = "default", wait: bool = False) -> list[Any]:
    """Publish jobs, of the demo model where they name none; return their results where they are waited for."""
    running = read_ready_file(state_dir)
    assert running is not None
    login = tenant_login(state_dir, tenant)
    url = running.nats_url if login is None else with_login(running.nats_url, *login)
    whole = [{"id": secrets.token_hex(8), "model": MODEL, "tenant": tenant, "lane": "batch", **job} for job in jobs]

    async def run() -> list[Any]:
        client = await nats.connect(url, allow_reconnect=False)
        results = [await client.subscribe(result_subject(tenant, str(job["id"]))) for job in whole]
        for job in whole:
            subject = request_subject(str(job["model"]), "batch", tenant)
            await client.jetstream().publish(subject, json.dumps(job).encode())
        found = [json.loads((await result.next_msg(60)).data) for result in results if wait]
        await client.close()
        return found

    return asyncio.run(run())
