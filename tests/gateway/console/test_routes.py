"""Files of the console over HTTP."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.console import routes
from gateway.console.routes import PLAYGROUND, ConsoleFiles, ConsoleRoutes, _not_found, with_playground
from gateway.console.views import MAX_TEXT, _letter, tenants_view
from gateway.errors import ApiError
from shared.conversation import ChatMessage
from shared.dead_letters import DeadLetter
from shared.messages import Request as Message
from shared.subjects import BATCH_ID
from shared.usage_ledger import UsageTotal


def request(headers: dict[str, str]) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "path_params": {"name": "index.html"}, "headers": raw})


def test_browser_keeps_a_file_until_it_is_another() -> None:
    files = ConsoleFiles()
    first = files.response(request({}))
    assert files.response(request({"if-none-match": first.headers["etag"]})).status_code == 304
    changed = files.response(request({"if-none-match": '"of the version before"'}))
    assert (changed.status_code, changed.body) == (200, first.body)


def test_id_of_a_batch_is_told_apart_from_those_of_its_lines() -> None:
    batch = f"batch_{'01' * 16}"
    assert BATCH_ID.fullmatch(batch)
    assert f"is a batch: ask for one of its lines, {batch}-1," in _not_found(batch)
    assert "No gateway keeps a request" in _not_found(f"{batch}-1")


@pytest.mark.parametrize(
    ("scope", "told"),
    [
        ({"type": "http", "path": next(iter(PLAYGROUND))}, "public"),
        ({"type": "http", "path": "/operator"}, "operator"),
        ({"type": "lifespan"}, "operator"),
    ],
)
async def test_requests_of_the_playground_alone_reach_the_public_application(scope: Scope, told: str) -> None:
    called: list[tuple[str, object, object, object]] = []

    def named(name: str) -> ASGIApp:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            called.append((name, scope, receive, send))

        return application

    receive, send = AsyncMock(), AsyncMock()
    await with_playground(named("operator"), named("public"))(scope, receive, send)
    assert called == [(told, scope, receive, send)]


def test_prompt_of_a_dead_letter_is_shown_to_its_end_and_only_where_prompts_may_be_shown() -> None:
    given = ("a" * MAX_TEXT + "end", [ChatMessage(role="user", content=each) for each in ("first", "last")])
    for name, each, shown in zip(("text", "messages"), given, ("a" * (MAX_TEXT - 3) + "end", "last"), strict=True):
        message = msgspec.convert({"id": "r", "model": "m", name: each}, Message)
        dead = DeadLetter(request=message, reason="worker_lost", error="", quarantined_by="g", quarantined=1.0)
        letter = msgspec.msgpack.encode(dead)
        assert _letter(1, letter, shows_prompts=True)["prompt"] == shown
        assert _letter(1, letter, shows_prompts=False)["prompt"] is None


def test_dead_letter_that_cannot_be_read_is_one_error_whatever_is_wrong_with_it() -> None:
    dead = DeadLetter(
        request=Message(id="r", model="m"), reason="worker_lost", error="killed", quarantined_by="g", quarantined=1.0
    )
    letter = msgspec.msgpack.encode(dead)
    assert _letter(1, letter, shows_prompts=True).items() >= {"reason": "worker_lost", "prompt": None}.items()
    # One more field, of arrays in arrays.
    deep = bytes([letter[0] + 1]) + letter[1:] + b"\xa1z" + b"\x91" * 5000
    for content in (b"\xc1", deep):
        with pytest.raises(msgspec.MsgspecError):
            _letter(1, content, shows_prompts=False)


async def test_use_of_tenants_is_sorted_by_tenant_model_and_lane_and_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = [
        UsageTotal(tenant, model, lane, "device_us", 3_600_000_000)
        for tenant, model, lane in (
            ("b", "m", "batch"),
            ("a", "n", "batch"),
            ("a", "m", "interactive"),
            ("a", "m", "batch"),
        )
    ]

    async def read(js: object, most: int) -> AsyncIterator[UsageTotal]:
        for total in totals:
            yield total

    monkeypatch.setattr("gateway.console.views.read_usage", read)
    keys = SimpleNamespace(listing=lambda: ([], []))
    view = await tenants_view(None, keys, 2.0)  # type: ignore[arg-type]
    shown = [(row["tenant"], row["model"], row["lane"]) for row in view["use"]]
    assert shown == [("a", "m", "batch"), ("a", "m", "interactive"), ("a", "n", "batch"), ("b", "m", "batch")]
    assert {row["cost"] for row in view["use"]} == {2.0}


async def test_request_that_no_process_keeps_is_not_found_and_orders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gateway.console.routes.JobTimelines", lambda js: SimpleNamespace(find=AsyncMock(return_value=[]))
    )
    exchange = SimpleNamespace(find=AsyncMock(return_value=[]), summaries=AsyncMock(return_value=["one"]))
    served = ConsoleRoutes(SimpleNamespace(exchange=exchange, js=None, device_hour_cost=None))  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="No gateway keeps a request") as refused:
        await served._request(Request({"type": "http", "path_params": {"id": "r"}}))
    assert (refused.value.status, refused.value.code) == (404, "request_not_found")
    with pytest.raises(ApiError, match="'order' must be one of recent, slow, first, failed, running"):
        await served._requests(Request({"type": "http", "query_string": b"order=other"}))
    assert await served._requests(Request({"type": "http", "query_string": b"order=slow&limit=7"})) == {
        "requests": ["one"]
    }
    exchange.summaries.assert_called_once_with("slow", 7)


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_bars_stand_out_from_their_track_and_like_hues_from_each_other_in_both_themes() -> None:
    css = (Path(routes.__file__).parent / "static/console.css").read_text()
    themes = [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", part)) for part in css.split(":root[", 1)]
    kinds = ("queue", "prefix", "read", "wait", "prefill", "decode", "gateway", "preempted", "worker")
    alike = (
        ("queue", "gateway"),
        ("queue", "worker"),
        ("gateway", "worker"),
        ("prefix", "wait"),
        ("prefill", "decode"),
    )
    for theme in themes:
        assert {kind for kind in kinds if contrast(theme[kind], theme["back"]) < 3} == set()
        assert {pair for pair in alike if contrast(theme[pair[0]], theme[pair[1]]) < 1.4} == set()
