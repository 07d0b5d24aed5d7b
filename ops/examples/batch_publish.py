"""Run one batch request through the queue with nothing but nats-py.

Run as `python batch_publish.py NATS_URL MODEL PROMPT [TENANT]`.

NATS_URL carries the credentials of a tenant's user, `nats://batch:PASSWORD@HOST:PORT`; `headrace up` writes it into its
ready file. The request is JSON with the fields of `shared.messages.Request`: `id`, unique within the tenant; `model`;
`tenant`, the same as in the subject, `default` when left out; one of `text`, `messages` and `token_ids`; and optionally
`sampling`, `priority`, `deadline` (Unix seconds) and `reply` (a subject `hr.reply.<tenant>.<...>` that gets the result
too).

Once the publish is acknowledged the request is on disk and will be answered once, even if this program ends: the result
passes by on `hr.result.<tenant>.<id>` when it is stored. For a week it answers a request, with an empty body, to
`$JS.API.DIRECT.GET.HR_RESULTS.hr.result.<tenant>.<id>`; until then that answer has the header `Status: 404`. A request
published again under its id is answered by the result it has, so publish again whenever in doubt. A job that no worker
has taken after a week (`headrace setup --tenant-max-wait-s`), for instance because none serves its model, gets the
result `expired`.
In subjects, every byte of a name other than a letter, a digit or `-` is written as `_` and two hex digits.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import uuid

import nats


def token(name: str) -> str:
    """Encode a name for use in a subject."""
    return re.sub(r"[^A-Za-z0-9-]", lambda m: f"_{ord(m[0]):02x}", name.encode().decode("latin-1"))


async def main(nats_url: str, model: str, prompt: str, tenant: str = "default") -> None:
    """Publish a request, wait for its result, and print it."""
    request_id = uuid.uuid4().hex
    sampling = {"max_tokens": 32, "temperature": 0.0}
    request = {
        "id": request_id,
        "model": model,
        "tenant": tenant,
        "lane": "batch",
        "text": prompt,
        "sampling": sampling,
    }
    # Without reconnecting, a wrong password or address is an error at once; a program that runs for long wants it on.
    client = await nats.connect(nats_url, allow_reconnect=False)
    result = await client.subscribe(f"hr.result.{token(tenant)}.{request_id}")
    await client.jetstream().publish(f"hr.req.{token(model)}.batch.{token(tenant)}", json.dumps(request).encode())
    message = await result.next_msg(timeout=300)
    print(json.dumps(json.loads(message.data), indent=2))
    await client.close()


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit("usage: python batch_publish.py NATS_URL MODEL PROMPT [TENANT]")
    asyncio.run(main(*sys.argv[1:]))
