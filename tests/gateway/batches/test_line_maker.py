"""Lines are made as their model computes them, or only as their results are read."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from gateway.api.large_bodies import LargeBodies
from gateway.batches.input_lines import InputLine
from gateway.batches.line import BatchLine
from gateway.batches.line_maker import LineMaker, NotReadyError
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from gateway.media.intake import ImageIntake, ImageLimits
from shared.adapter_files import AdapterContent
from shared.adapter_names import NamedAdapter
from shared.errors import BadRequestError
from shared.media_store import LINE_TTL_S, MediaFullError
from shared.sampling import Sampling
from tests.gateway.batches.test_line import chat_line
from tests.gateway.dispatch.test_inflight import fleet_load
from tests.gateway.fleet.test_fleet import Watched
from tests.gateway.media.test_intake import PNG, Parts
from tests.gateway.responses.test_truncated_images import CONTEXT, Words


def test_line_whose_adapter_was_removed_is_answered_and_one_whose_workers_are_away_waits() -> None:
    watched = Watched()
    watched.fleet.sweep(watched.now)
    watched.hear()
    names = watched.fleet.named_adapters
    services = Mock(settled=lambda generation, tenant: generation, fleet=watched.fleet)
    maker = LineMaker(cast("Any", services), cast("Any", Mock(tenant="acme")))
    line = Generation("completion", "a", (Prompt(1, text="a"),), 1, Sampling(), deterministic=True)
    names.note(NamedAdapter("a", "acme", "m", AdapterContent("1" * 64, 8)))
    with pytest.raises(NotReadyError, match="can serve the adapter `a` at the moment"):
        maker._settled(line)
    names.note(NamedAdapter("a", "acme", "m", None))
    with pytest.raises(BadRequestError, match="The adapter 'a' was removed"):
        maker._settled(line)


class Checks:
    """Checks grammars, each for as long as a test says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_now = self.most = self.num_checked = 0

    async def checked(self, generation: Generation, tenant: str) -> Generation:
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await asyncio.sleep(self.seconds)
        self.num_now -= 1
        self.num_checked += 1
        return generation


@pytest.mark.parametrize(("seconds", "num_made"), [(0.001, 8), (0.2, 2)])
async def test_grammars_of_a_batch_are_checked_one_at_a_time_and_lines_do_not_wait_long_for_their_turn(
    monkeypatch: pytest.MonkeyPatch, seconds: float, num_made: int
) -> None:
    monkeypatch.setattr("gateway.batches.line_maker._TURN_S", 0.3)
    checks = Checks(seconds)
    services: Any = Mock(
        bodies=LargeBodies(),
        settled=lambda generation, tenant: generation,
        watermark_of=lambda tenant, key: None,
        grammars=checks,
        max_line_bytes=1 << 20,
    )
    services.fleet.find_adapter.return_value = services.fleet.load.return_value = None
    services.fleet.named_adapters.was_removed.return_value = False
    services.clock.now.return_value = 1.0
    record: Any = Mock(tenant="acme", key="key", weight=1.0, expires_at=100.0)
    maker = LineMaker(services, record)
    data = json.dumps(chat_line(response_format={"type": "json_object"})).encode()
    places = [InputLine(number, 0, len(data), data) for number in range(8)]
    made = await asyncio.gather(
        *(maker.line_to_publish(place, f"batch-{place.number}") for place in places), return_exceptions=True
    )
    lines = [each for each in made if isinstance(each, BatchLine)]
    assert (checks.most, checks.num_checked, len(lines)) == (1, num_made, num_made)
    waiting = [each for each in made if isinstance(each, NotReadyError)]
    assert len(waiting) == 8 - num_made
    assert {each.reason for each in waiting} <= {"grammars"}


@pytest.mark.parametrize(
    ("body", "num_beside"), [({}, 0), ({"user": "u" * 500, "stop": ["s" * 999] * 4}, 1), ({"n": 128}, 1)]
)
async def test_lines_that_take_long_are_made_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], num_beside: int
) -> None:
    bodies = LargeBodies()
    in_thread = AsyncMock(side_effect=bodies.in_thread)
    monkeypatch.setattr(bodies, "in_thread", in_thread)
    services: Any = Mock(bodies=bodies, settled=lambda generation, tenant: generation, max_line_bytes=1 << 20)
    services.fleet.find_adapter.return_value = None
    services.clock.now.return_value = 1.0
    maker = LineMaker(services, cast("Any", Mock(tenant="acme", key="key", weight=1.0, expires_at=100.0)))
    data = json.dumps(chat_line(**{"temperature": 1, **body})).encode()
    line = await maker.line_to_read(InputLine(1, 0, len(data), data), "batch-1")
    assert len(line.requests) == body.get("n", 1)
    assert in_thread.await_count == num_beside


@pytest.mark.parametrize("is_full", [False, True])
async def test_images_of_a_line_are_kept_until_it_may_be_published_again(is_full: bool) -> None:
    """As long as an answer may take, they would fill the tenant's share before a large batch has ended."""
    parts = Parts()
    parts.error = MediaFullError("full", is_own=True) if is_full else None
    services: Any = Mock(
        bodies=LargeBodies(),
        images=ImageIntake(parts, ImageLimits(), parts),  # type: ignore[arg-type]
        settled=lambda generation, tenant: generation,
        watermark_of=lambda tenant, key: None,
        max_line_bytes=1 << 20,
    )
    services.fleet.find_adapter.return_value = services.fleet.load.return_value = None
    services.fleet.named_adapters.was_removed.return_value = False
    services.clock.now.return_value = 1.0
    maker = LineMaker(services, cast("Any", Mock(tenant="acme", key="key", weight=1.0, expires_at=100.0)))
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    data = json.dumps(chat_line(messages=[{"role": "user", "content": content}])).encode()
    making = maker.line_to_publish(InputLine(1, 0, len(data), data), "batch-1")
    if is_full:
        with pytest.raises(NotReadyError, match="full") as waiting:
            await making
        assert waiting.value.reason == "images"
    else:
        assert len((await making).requests[0].media) == 1
        assert [(tenant, ttl_s) for tenant, _, ttl_s in parts.stored] == [("acme", LINE_TTL_S)]


def long_response_line() -> bytes:
    messages = [{"role": "user", "content": " ".join([name, *["w"] * 3999])} for name in ("u1", "u2", "u3")]
    body = {"model": "m", "input": messages, "truncation": "auto", "max_output_tokens": 4}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}).encode()


def shortening_maker(words: Words, num_workers: int, wake: Mock | None = None) -> LineMaker:
    services: Any = Mock(
        bodies=LargeBodies(),
        settled=lambda generation, tenant: generation,
        watermark_of=lambda tenant, key: None,
        tokenizer=words,
        wake=wake or Mock(),
        images=Mock(limits=ImageLimits()),
        max_line_bytes=1 << 20,
    )
    load = msgspec.structs.replace(fleet_load(), num_workers=num_workers, max_model_len=CONTEXT, chat_format="hermes")
    services.fleet.find_adapter.return_value = None
    services.fleet.named_adapters.was_removed.return_value = False
    services.fleet.load.return_value = load
    services.clock.now.return_value = 1.0
    return LineMaker(services, cast("Any", Mock(tenant="acme", key="key", weight=1.0, expires_at=100.0)))


async def test_line_that_may_be_truncated_is_shortened_as_a_request_once_a_worker_can_count() -> None:
    words, data = Words(), long_response_line()
    place = InputLine(1, 0, len(data), data)
    wake = Mock()
    with pytest.raises(NotReadyError, match="No worker of `m`"):
        await shortening_maker(words, 0, wake).line_to_publish(place, "batch-1")
    # A host has it, and no job of this line would wake it.
    wake.assert_called_once_with("m")
    line = await shortening_maker(words, 1).line_to_publish(place, "batch-1")
    (request,) = line.requests
    assert [message.content[:2] for message in request.messages or ()] == ["u2", "u3"]
    assert request.id == "batch-1-0"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ApiError(400, "Roles must alternate.", param="messages", code="invalid_value"), BadRequestError),
        (ApiError(504, "No worker answered within 10 s.", code="timeout"), NotReadyError),
    ],
)
async def test_line_whose_tokens_are_not_counted_is_refused_alone_or_waits(
    error: ApiError, expected: type[Exception]
) -> None:
    words, data = Words(error=error), long_response_line()
    with pytest.raises(expected) as refusal:
        await shortening_maker(words, 1).line_to_publish(InputLine(1, 0, len(data), data), "batch-1")
    if isinstance(refusal.value, BadRequestError):
        assert (refusal.value.param, str(refusal.value)) == ("body.input", "body: Roles must alternate.")
