"""Images of requests at a worker: fetched by digest for their tenant, counted as tokens, and given to the sequence."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from gpu_worker.consumer import intake
from gpu_worker.consumer.request_images import give, shown
from gpu_worker.core.media import MediaSpan, PreparedImage
from gpu_worker.core.sequence import Sequence as EngineSequence
from gpu_worker.media.decoder import Decoder
from gpu_worker.media.prepared_images import ImagesBusyError
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError
from shared.features import IMAGES
from shared.limited_link import LimitedProcessError
from shared.media import IMAGES_BUSY, ContentImage, MediaRef
from shared.media_store import MediaStore
from shared.messages import Request, encode, encode_request
from shared.sampling import Sampling
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import TokenizeCall, TokenizerReply
from tests.gpu_worker.consumer.harness import (
    DEMO_MODEL,
    TOKENIZER,
    Answer,
    MakeWorker,
    RunningWorker,
    TestGateway,
    fresh_name,
    start_worker,
)
from tests.images import encoded, picture, reference, scans_added, turned

PLACEHOLDER = TOKENIZER.encode_text("§", add_special_tokens=False)[-1]
TOKENS_PER_IMAGE = 7
PNG, JPEG = encoded(picture()), turned(picture(seed=1), 6)


@dataclass(eq=False)
class Prepared:
    ref: MediaRef
    values: Any


USER = ChatMessage(role="user", content="a")


class Processor:
    """Reads each image as some tokens in the place of one, which the template writes."""

    def expand(self, token_ids: Sequence[int], refs: Sequence[MediaRef]) -> tuple[list[int], list[Any]]:
        if token_ids.count(PLACEHOLDER) != len(refs):
            raise BadRequestError(
                f"The template shows {token_ids.count(PLACEHOLDER)} images of {len(refs)}.", "messages"
            )
        expanded: list[int] = []
        for token_id in token_ids:
            expanded += [token_id] * (TOKENS_PER_IMAGE if token_id == PLACEHOLDER else 1)
        return expanded, [ref.digest for ref in refs]

    def prepared_bytes(self, ref: MediaRef) -> int:
        return 0

    def prepare(self, ref: MediaRef, pixels: Any) -> Prepared:
        return Prepared(ref, pixels)


TEMPLATE = (
    "{% for m in messages if m.role == 'user' %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if p.type == 'image' %}§{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def seeing_tokenizer() -> ModelTokenizer:
    directory = read_model_directory(DEMO_MODEL)
    config = {**directory.tokenizer_config, "chat_template": TEMPLATE}
    return ModelTokenizer(dataclasses.replace(directory, tokenizer_config=config))


SEEING = seeing_tokenizer()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[Any], list[Prepared]]]:
    """The length of each sequence that has images, where they are, and their pixels."""
    found: list[tuple[int, list[Any], list[Prepared]]] = []
    monkeypatch.setattr(intake, "give", lambda sequence, *rest: found.append((sequence.num_prompt_tokens, *rest)))
    return found


@pytest.fixture
async def worker(make_worker: MakeWorker, given: list[Any], monkeypatch: pytest.MonkeyPatch) -> RunningWorker:
    return await make_worker(media=Processor(), tokenizer=SEEING)


async def stored(gateway: TestGateway, *images: bytes, tenant: str = "t") -> tuple[MediaRef, ...]:
    store = MediaStore(gateway.js)
    for image in images:
        await store.put(tenant, image)
    return tuple(map(reference, images))


def asking(gateway: TestGateway, media: tuple[MediaRef, ...], *indices: int, **fields: Any) -> Request:
    shown = tuple(ContentImage(place, index) for place, index in enumerate(indices))
    content = ChatMessage(role="user", content="ab", part_lengths=(1, 1), images=shown)
    return gateway.request(None, **{"messages": (content,), "media": media, "tenant": "t", **fields})


async def ask(gateway: TestGateway, request: Request) -> Any:
    await gateway.publish_raw(encode_request(request))
    return await gateway.answer(request.id).wait(20)


async def test_sequence_has_its_images_and_its_prompt_their_tokens(
    gateway: TestGateway, worker: RunningWorker, given: list[Any]
) -> None:
    media = await stored(gateway, PNG, JPEG)
    answer = await ask(gateway, asking(gateway, media, 1, 0))
    ((num_tokens, spans, images),) = given
    assert spans == [media[1].digest, media[0].digest]
    assert [image.values.shape for image in images] == [(40, 30, 3), (30, 40, 3)]
    np.testing.assert_array_equal(images[1].values, np.asarray(picture()))
    plain = len(TOKENIZER.encode_text("a§b§", add_special_tokens=False))
    assert num_tokens == plain + 2 * (TOKENS_PER_IMAGE - 1)
    told = [delta.prompt_tokens for delta in answer.deltas if delta.prompt_tokens is not None]
    assert told == [num_tokens]
    assert (answer.finish.reason, answer.finish.usage.prompt_tokens) == ("length", num_tokens)


async def test_worker_that_sees_says_so(worker: RunningWorker, make_worker: Callable[..., Any]) -> None:
    assert IMAGES in (await worker.wait_for_heartbeat(lambda beat: True)).features
    blind = await make_worker()
    assert IMAGES not in (await blind.wait_for_heartbeat(lambda beat: True)).features


@pytest.mark.parametrize(
    ("change", "problem", "param"),
    [
        ({"width": 41}, "is image/png of 40x30; its reference says image/png of 41x30", "media.[0]"),
        ({"mime": "image/gif"}, "its reference says image/gif", "media.[0]"),
        ({"num_bytes": 5}, "has another length or digest", "media.[0]"),
        ({"digest": bytes(32)}, "is no longer stored", "media.[0]"),
        ({"width": 30000, "height": 30000}, "this worker reads", "media"),
    ],
)
async def test_stranger_that_lies_about_an_image_is_refused_with_the_reason(
    gateway: TestGateway, worker: RunningWorker, change: dict[str, Any], problem: str, param: str
) -> None:
    (ref,) = await stored(gateway, PNG)
    answer = await ask(gateway, asking(gateway, (msgspec.structs.replace(ref, **change),), 0))
    assert (answer.finish.reason, answer.finish.error_param) == ("failed", param)
    assert problem in answer.finish.error


async def test_lie_about_an_image_that_was_read_lately_is_refused(gateway: TestGateway, worker: RunningWorker) -> None:
    (ref,) = await stored(gateway, PNG)
    assert (await ask(gateway, asking(gateway, (ref,), 0))).finish.reason == "length"
    lie = msgspec.structs.replace(ref, width=48, height=32)
    answer = await ask(gateway, asking(gateway, (lie,), 0))
    assert (answer.finish.reason, answer.finish.error_code) == ("failed", "invalid_image")
    assert "is image/png of 40x30; its reference says image/png of 48x32" in answer.finish.error


def test_sequence_gets_no_image_that_fills_other_places_than_it_has() -> None:
    spans = [MediaSpan(number, 4, bytes([number]) * 32, 4) for number in range(2)]
    images = [PreparedImage(span.digest, object(), (1, 1), rows) for span, rows in zip(spans, (4, 6), strict=True)]
    sequence = EngineSequence("s", [1] * 8, 8, Sampling(), max_tokens=1)
    with pytest.raises(BadRequestError, match="Image 2 of 2 is not what its reference in 'media' says"):
        give(sequence, spans, images)
    assert sequence.images == ()


def test_embeddings_of_an_image_are_shared_within_a_tenant_alone() -> None:
    """A hit is quick, so a tenant could measure whether another one has shown the image."""
    pixels, found = object(), []
    for tenant in ("a", "a", "b"):
        sequence = EngineSequence("s", [1] * 8, 8, Sampling(), max_tokens=1, salt=tenant.encode())
        give(sequence, [MediaSpan(0, 4, bytes(32), 4)], [PreparedImage(bytes(32), pixels, (1, 1), 4)])
        assert sequence.media[0].digest == sequence.images[0].digest
        assert sequence.images[0].values is pixels
        found.append(sequence.media[0].digest)
    assert found[0] == found[1] != found[2]


def fail_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    decode, failures = Decoder.decode, iter("f")

    async def decode_or_fail(self: Decoder, ref: MediaRef, data: bytes, cpu_s: float) -> Any:
        if next(failures, None) is not None:
            raise error
        return await decode(self, ref, data, cpu_s)

    monkeypatch.setattr(Decoder, "decode", decode_or_fail)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (LimitedProcessError("the process that decodes images does not answer"), ("handoff", None)),
        (ImagesBusyError("Many images wait."), ("failed", IMAGES_BUSY)),
    ],
)
async def test_request_whose_images_cannot_be_decoded_now_goes_back(
    gateway: TestGateway,
    worker: RunningWorker,
    given: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    ending: tuple[str, str | None],
) -> None:
    fail_once(monkeypatch, error)
    media = await stored(gateway, PNG)
    # Its gateway queues it once more, or its client asks again.
    ends = [(await ask(gateway, asking(gateway, media, 0))).finish for _ in range(2)]
    assert [(end.reason, end.error_code) for end in ends] == [ending, ("length", None)]
    assert len(given) == 1


async def test_job_whose_images_have_no_room_now_is_done_later(
    gateway: TestGateway, worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, ImagesBusyError("Many images wait."))
    media = await stored(gateway, PNG, tenant="acme")
    job = await gateway.publish_job(asking(gateway, media, 0, tenant="acme", lane="batch", reply=None))
    assert (await gateway.result(job.id, timeout_s=20)).finish == "length"


async def test_images_of_another_tenant_are_not_there(gateway: TestGateway, worker: RunningWorker) -> None:
    answer = await ask(gateway, asking(gateway, await stored(gateway, PNG), 0, tenant="mallory"))
    assert "no longer stored" in answer.finish.error


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"truncate_prompt_tokens": 5}, "a prompt with images is not cut"),
        ({"messages": None, "token_ids": (1, 2)}, "only a conversation that is answered may show images"),
        ({"messages": (ChatMessage(role="system", content="a", images=(ContentImage(0, 0),)), USER)}, "0 images of 1"),
    ],
)
async def test_images_that_cannot_be_shown_are_refused(
    gateway: TestGateway, worker: RunningWorker, fields: dict[str, Any], problem: str
) -> None:
    request = asking(gateway, await stored(gateway, PNG), 0)
    answer = await ask(gateway, msgspec.structs.replace(request, **fields))
    assert problem in answer.finish.error


async def test_message_that_shows_an_image_that_there_is_not_is_refused(
    gateway: TestGateway, worker: RunningWorker
) -> None:
    answer = await ask(gateway, asking(gateway, await stored(gateway, PNG), 0, 1))
    assert "image number 1 is shown, and 'media' has 1" in answer.finish.error


async def test_too_many_tokens_are_refused_before_an_image_is_fetched(
    gateway: TestGateway, worker: RunningWorker
) -> None:
    media = (reference(PNG),)
    request = asking(gateway, media, 0)
    long = msgspec.structs.replace(request.messages[0], content="x " * 8000)  # type: ignore[index]
    answer = await ask(gateway, msgspec.structs.replace(request, messages=(long,)))
    assert answer.finish.error_code == "context_length_exceeded"


async def test_text_goes_on_beside_an_image_that_takes_long(
    gateway: TestGateway, worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, get = asyncio.Event(), MediaStore.get

    async def slow(self: MediaStore, tenant: str, ref: MediaRef) -> bytes:
        await may_go_on.wait()
        return await get(self, tenant, ref)

    monkeypatch.setattr(MediaStore, "get", slow)
    request = asking(gateway, await stored(gateway, PNG), 0)
    await gateway.publish_raw(encode_request(request))
    assert (await gateway.ask("x = ", tenant="t")).finish.reason == "length"
    # Its gateway hears that the worker has it.
    await asyncio.wait_for(gateway.answer(request.id).claimed.wait(), 10)
    may_go_on.set()
    assert (await gateway.answer(request.id).wait(20)).finish.reason == "length"


async def test_images_that_take_long_hold_up_their_own_tenant_alone(
    gateway: TestGateway, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests with JPEGs whose last scan comes again and again, which wait for room; a small image passes."""
    monkeypatch.setattr(intake, "give", lambda *_: None)
    await make_worker(media=Processor(), tokenizer=SEEING, image_memory_bytes=25 << 20)
    flat = encoded(Image.new("RGB", (1400, 1400), "red"), "JPEG", progressive=True)

    async def slow(number: int, num_scans: int) -> Answer:
        data = [scans_added(flat[:2] + b"\xff\xfe\0\3%c" % (number + place) + flat[2:], num_scans) for place in (0, 1)]
        return await gateway.publish(
            asking(gateway, await stored(gateway, *data, tenant="mallory"), 0, 1, tenant="mallory")
        )

    bomb, legal = await slow(0, 300), [await slow(number, 50) for number in range(10, 60, 10)]
    media = await stored(gateway, PNG)
    assert (await ask(gateway, asking(gateway, media, 0))).finish.reason == "length"
    # Served in the order of the requests, it would find room when three of these have ended.
    num_waiting = sum(not answer.finished.is_set() for answer in legal)
    assert num_waiting >= 3, "the small image waited for the others"
    assert "The image has more than 64 scans" in (await bomb.wait(20)).finish.error
    assert [(await answer.wait(60)).finish.reason for answer in legal] == ["length"] * 5


async def test_calls_count_the_tokens_of_images_without_reading_them(
    gateway: TestGateway, worker: RunningWorker, make_worker: Callable[..., Any], nats_url: str
) -> None:
    request = asking(gateway, (reference(PNG),), 0)
    call = TokenizeCall(messages=request.messages, add_special_tokens=False, tenant="t", media=request.media)

    async def reply(model: str) -> TokenizerReply:
        found = await gateway.nats.request(tokenizer_subject(model), encode(call), timeout=10)
        return msgspec.msgpack.decode(found.data, type=TokenizerReply)

    assert (await reply(gateway.model)).token_ids.count(PLACEHOLDER) == TOKENS_PER_IMAGE
    blind = await start_worker(nats_url, fresh_name("blind"))
    try:
        assert "reads no images" in ((await reply(blind.worker.consumer._source.model)).error or "")
    finally:
        await blind.close()


def test_one_image_is_shown_no_more_often_than_a_request_may_have_images() -> None:
    image = reference(PNG)
    messages = [ChatMessage(role="user", content="", images=(ContentImage(0, 0),) * count) for count in (64, 1)]
    assert shown(tuple(messages[:1]), [image]) == [image] * 64
    with pytest.raises(BadRequestError, match="messages: 65 images are shown; at most 64 are read"):
        shown(tuple(messages), [image])
