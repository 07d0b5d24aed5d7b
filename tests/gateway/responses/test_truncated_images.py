"""`truncation: "auto"` and images: a worker that counts words and pixels, and hosts that count what is fetched."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.media.intake import ImageIntake, ImageLimits
from gateway.responses.draft import ResponseGeneration
from gateway.responses.truncation import TokenCounter, Truncation
from shared.bounds import MAX_IMAGES, MAX_MESSAGES
from shared.features import IMAGES
from shared.media_store import INTERACTIVE_TTL_S
from shared.tokenizer_calls import TokenizeCall, TokenizerReply
from tests.gateway.dispatch.test_inflight import fleet_load
from tests.gateway.media.test_intake import Parts
from tests.gateway.parsed_bodies import messages_of, response
from tests.images import encoded, picture

CONTEXT = 8192
LOAD = msgspec.structs.replace(fleet_load(), num_workers=1, max_model_len=CONTEXT, features=frozenset({IMAGES}))
TOKENS_PER_IMAGE = 500
PNG = encoded(picture())
PIXELS = 40 * 30


@dataclass
class Hosts(Parts):
    """Hosts that have every image but those of `gone`, and a store."""

    gone: frozenset[str] = frozenset()
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def fetch(self, tenant: str, url: str, where: str) -> bytes:
        self.fetched.append(url.rpartition("/")[2])
        if self.fetched[-1] in self.gone:
            raise ApiError(400, f"The image at '{where}' could not be fetched.", param=where, code="invalid_image")
        return PNG


@dataclass
class Words:
    """A tokenizer of words and images, or one that raises an error, and how many calls it has answered."""

    num_calls: int = 0
    error: ApiError | None = None

    async def call(self, model: str, tenant: str, call: TokenizeCall) -> TokenizerReply:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        words = sum(len(message.content.split()) for message in call.messages or ())
        return TokenizerReply(token_ids=(1,) * (words + TOKENS_PER_IMAGE * len(call.media)))


def shows(name: str, num_words: int = 1) -> list[dict[str, Any]]:
    """Return a turn whose user shows the image of this name."""
    text = {"type": "input_text", "text": " ".join([name, *["w"] * (num_words - 1)])}
    image = {"type": "input_image", "image_url": f"https://x/{name}"}
    return [{"role": "user", "content": [text, image]}, {"role": "assistant", "content": "seen"}]


def shows_inline(name: str) -> list[dict[str, Any]]:
    """Return a turn whose user sends the image of this name with the request."""
    user, answer = shows(name)
    user["content"][1]["image_url"] = f"data:image/png;base64,{b64encode(PNG).decode()}"
    return [user, answer]


def said(name: str, num_words: int) -> dict[str, Any]:
    return {"role": "user", "content": " ".join([name, *["w"] * (num_words - 1)])}


def clicked(name: str) -> list[dict[str, Any]]:
    """Return a call whose result is an image."""
    output = [{"type": "input_image", "image_url": f"https://x/{name}"}]
    return [
        {"type": "function_call", "call_id": name, "name": "click", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": output},
    ]


async def truncated(items: list[dict[str, Any]], hosts: Hosts, **limits: int) -> tuple[ResponseGeneration, Words]:
    """Return what is generated from, its images stored."""
    generation = response(items, truncation="auto", max_output_tokens=4)
    images, words = ImageIntake(hosts, ImageLimits(**limits), hosts), Words()  # type: ignore[arg-type]
    truncation = Truncation(generation, LOAD)
    assert truncation.is_needed
    shorter = await truncation.truncated(TokenCounter(cast("Any", words), images, "acme", INTERACTIVE_TTL_S))
    return cast("ResponseGeneration", await images.stored(shorter, "acme")), words


def names(generation: ResponseGeneration) -> list[str]:
    return [message.content.split()[0] for message in messages_of(generation) if message.role == "user"]


async def test_images_of_dropped_turns_are_neither_fetched_nor_counted() -> None:
    hosts = Hosts(gone=frozenset({"u0", "u3"}))
    items = [item for number in range(60) for item in shows(f"u{number}")]
    generation, words = await truncated([*items, said("last", 1)], hosts)
    # 503 tokens a turn.
    assert names(generation) == [*(f"u{number}" for number in range(44, 60)), "last"]
    assert len(generation.prompts[0].media) == 16
    # The one before them had to be read to know that it does not fit; each is read once.
    assert sorted(hosts.fetched) == sorted({f"u{number}" for number in range(43, 60)})
    assert words.num_calls < 16


async def test_no_image_is_fetched_that_the_text_alone_leaves_no_room_for() -> None:
    hosts = Hosts(gone=frozenset({"old"}))
    items = [*shows("old", 2000), *shows("new", 10), said("long", 7000), {"role": "assistant", "content": "x"}]
    generation, _ = await truncated([*items, said("last", 1)], hosts)
    assert (names(generation), hosts.fetched) == (["new", "long", "last"], ["new"])


async def test_oldest_screenshots_of_an_agent_are_dropped() -> None:
    hosts = Hosts(gone=frozenset({"s0"}))
    items = [said("task", 1), *(item for number in range(40) for item in clicked(f"s{number}"))]
    generation, _ = await truncated(items, hosts)
    kept = [message.tool_call_id for message in messages_of(generation) if message.tool_call_id]
    assert names(generation) == ["task"]
    assert kept == [f"s{number}" for number in range(24, 40)]
    assert len(generation.prompts[0].media) == len(kept)


async def test_bad_image_that_would_be_read_is_refused_and_not_dropped() -> None:
    items = [item for number in range(5) for item in shows(f"u{number}")]
    with pytest.raises(ApiError) as refusal:
        await truncated([*items, said("last", 1)], Hosts(gone=frozenset({"u1"})))
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_image")
    assert refusal.value.param == "input.[2].content.[1].image_url"


async def test_conversation_is_shortened_to_the_images_and_pixels_that_are_read() -> None:
    items = [item for number in range(40) for item in shows(f"u{number}")]
    for most in (16, 15):
        generation, _ = await truncated([*items, said("last", 1)], Hosts(), max_images=most)
        assert len(generation.prompts[0].media) == most
    inline = [item for number in range(40) for item in shows_inline(f"u{number}")]
    generation, _ = await truncated([*inline, said("last", 1)], Hosts(), max_total_pixels=10 * PIXELS + 5)
    assert len(generation.prompts[0].media) == 10
    with pytest.raises(ApiError) as refusal:
        await truncated(inline[:2] * 2, Hosts(), max_images=0)
    assert refusal.value.code == "unsupported_image"


async def test_images_of_a_conversation_count_when_it_has_been_shortened() -> None:
    items = [item for number in range(MAX_IMAGES + 36) for item in shows_inline(f"u{number}")]
    generation, _ = await truncated([*items, said("last", 1)], Hosts())
    assert names(generation) == [*(f"u{number}" for number in range(MAX_IMAGES + 20, MAX_IMAGES + 36)), "last"]
    assert len(generation.prompts[0].media) == 16
    # Of tiny ones as many are left as the gateway reads.
    truncation = Truncation(response(items, truncation="auto"), msgspec.structs.replace(LOAD, max_model_len=1 << 20))
    counter = TokenCounter(cast("Any", Words()), ImageIntake(Hosts(), ImageLimits(), Hosts()), "acme", None)  # type: ignore[arg-type]
    assert len((await truncation.truncated(counter)).prompts[0].images) == ImageLimits().max_images
    with pytest.raises(ApiError):
        response(items)


def test_conversation_that_may_be_shortened_has_as_many_images_as_messages_at_most() -> None:
    part = {"type": "input_image", "image_url": "https://a.example/x"}
    item = {"role": "user", "content": [part] * (MAX_MESSAGES // 2)}
    assert len(response([item] * 2, truncation="auto").prompts[0].images) == MAX_MESSAGES
    with pytest.raises(ApiError, match=rf"input.\[2\].content.\[0\].image_url' .* at most {MAX_MESSAGES} are read"):
        response([item] * 3, truncation="auto")
