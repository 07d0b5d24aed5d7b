"""What is kept outside of processes: the use of tenants, their keys and limits, dead letters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from msgspec.structs import asdict
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.admission.auth import KeyStore
from gateway.errors import ApiError
from shared.dead_letters import DeadLetter
from shared.errors import ConfigError
from shared.messages import UNDECODABLE
from shared.streams import DEAD_STREAM
from shared.usage_ledger import read_usage

MAX_TOTALS = 6000
MAX_LETTERS = 100
MAX_LOOKED_AT = 500
MAX_TEXT = 500


async def tenants_view(js: JetStreamContext, keys: KeyStore, device_hour_cost: float | None) -> dict[str, Any]:
    """Return the use of tenants since the system was set up, the limits of tenants, and keys without their hashes.

    Raises:
        ApiError: 503; NATS does not answer. 500; the key file cannot be read.
    """
    use: defaultdict[tuple[str, str, str], dict[str, Any]] = defaultdict(dict)
    try:
        async for each in read_usage(js, MAX_TOTALS):
            use[each.tenant, each.model, each.lane][each.measure] = each.total
    except (NatsError, OSError) as error:
        raise nats_away("the use of tenants") from error
    try:
        records, limits = keys.listing()
    except ConfigError as error:
        raise ApiError(500, f"The key file cannot be read: {error}", code="keys_unreadable") from error
    rows = [{"tenant": tenant, "model": model, "lane": lane} | counts for (tenant, model, lane), counts in use.items()]
    for row in rows:
        row["cost"] = None if device_hour_cost is None else row.get("device_us", 0) / 3.6e9 * device_hour_cost
    shown = [{name: value for name, value in asdict(record).items() if name != "sha256"} for record in records]
    use_first = sorted(rows, key=lambda row: (row["tenant"], row["model"], row["lane"]))
    return {"use": use_first, "limits": [asdict(record) for record in limits], "keys": shown}


async def dead_letters_view(js: JetStreamContext, *, shows_prompts: bool) -> dict[str, Any]:
    """Return the newest dead letters, the last one first.

    Raises:
        ApiError: 503; NATS does not answer, or this login may not read them.
    """
    letters: list[dict[str, Any]] = []
    try:
        state = (await js.stream_info(DEAD_STREAM)).state
        seq = state.last_seq
        first = max(1, state.first_seq, seq - MAX_LOOKED_AT)
        while seq >= first and len(letters) < MAX_LETTERS and state.messages:
            try:
                message = await js.get_msg(DEAD_STREAM, seq=seq)
                letters.append(_letter(seq, message.data or b"", shows_prompts=shows_prompts))
            except msgspec.MsgspecError:
                pass  # of another version
            except NatsError as error:
                if getattr(error, "code", None) != 404:
                    raise
            seq -= 1
    except (NatsError, OSError) as error:
        raise nats_away("dead letters", "`headrace dead list` shows them") from error
    return {"letters": letters, "total": state.messages}


def _letter(seq: int, content: bytes, *, shows_prompts: bool) -> dict[str, Any]:
    try:
        letter = msgspec.msgpack.decode(content, type=DeadLetter)
    except UNDECODABLE as error:
        raise msgspec.MsgspecError(str(error)) from error
    request = letter.request
    text = request.text if request.text is not None else request.messages[-1].content if request.messages else None
    return {
        "seq": seq,
        "id": request.id,
        "request_id": request.trace,
        "tenant": request.tenant,
        "model": request.model,
        "lane": request.lane,
        "reason": letter.reason,
        "error": letter.error,
        "quarantined": letter.quarantined,
        "by": letter.quarantined_by,
        "attempts": [asdict(attempt) for attempt in letter.attempts],
        "prompt": str(text)[-MAX_TEXT:] if shows_prompts and text is not None else None,
    }


def nats_away(what: str, instead: str = "try again") -> ApiError:
    """Return the 503 that says what could not be read."""
    message = f"NATS does not tell {what}: it is away, or this login may not read them; {instead}."
    return ApiError(503, message, code="records_unavailable", retry_after_s=5.0)
