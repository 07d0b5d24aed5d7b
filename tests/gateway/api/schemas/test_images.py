"""Images in the bodies of three APIs: what they show, where it stands, and why it is refused."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.schemas.images import image_at, image_of
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from gateway.responses.request import own_items, parse_body, to_generation
from shared.bounds import MAX_IMAGES
from shared.conversation import ChatMessage
from tests.gateway import parsed_bodies
from tests.gateway.refusals import refused
from tests.images import encoded, picture, png_of_size

PNG = encoded(picture())
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
Parse = Callable[[Any], Generation]


def chat(*content: Any, role: str = "user", **fields: Any) -> Generation:
    return parsed_bodies.chat([{"role": role, "content": content, **fields}])


def response(*content: Any) -> Generation:
    return parsed_bodies.response([{"role": "user", "content": content}])


def message(*content: Any) -> Generation:
    return parsed_bodies.message([{"role": "user", "content": content}])


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def only(generation: Generation) -> tuple[Prompt, ChatMessage]:
    (prompt,) = generation.prompts
    assert prompt.messages is not None
    return prompt, prompt.messages[-1]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (chat(text("a"), {"type": "image_url", "image_url": {"url": URL}}, text("b")), ("a", 0, "b")),
        (chat({"type": "image_url", "image_url": URL}, text("b")), (0, "b")),
        (chat(text("a"), {"type": "image_url", "image_url": {"url": URL, "detail": None}}), ("a", 0)),
        (chat({"type": "image_url", "image_url": URL}, role="tool", tool_call_id="c"), (0,)),
        (
            response({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL, "detail": "auto"}),
            ("a", 0),
        ),
        (
            parsed_bodies.response(
                [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}],
                    },
                ]
            ),
            ("a", 0),
        ),
        (message(text("a"), IMAGE_BLOCK), ("a", 0)),
        (message(text("a"), IMAGE_BLOCK, text("b")), ("a\n\n", 0, "b")),
    ],
)
def test_images_stand_where_the_client_wrote_them(generation: Generation, expected: tuple[Any, ...]) -> None:
    prompt, last = only(generation)
    assert last.texts_and_images == expected
    (image,) = prompt.images
    assert (image.data, image.detail) == (PNG, "auto")
    assert prompt.estimated_tokens > 16


@pytest.mark.parametrize("detail", ["high", "original"])
def test_an_image_in_its_original_detail_is_read_as_finely_as_possible(detail: str) -> None:
    chats = chat({"type": "image_url", "image_url": {"url": URL, "detail": detail}})
    by_url = response({"type": "input_image", "image_url": URL, "detail": detail})
    by_file = response({"type": "input_image", "file_id": "file-1", "detail": detail})
    assert [only(each)[0].images[0].detail for each in (chats, by_url, by_file)] == ["high"] * 3


@pytest.mark.parametrize(
    "part",
    [
        IMAGE_BLOCK,
        {"type": "image_file", "image_file": {"file_id": "file-1"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "input_image", "file_id": "file-1"},
    ],
)
def test_images_as_other_apis_write_them_are_refused_with_the_form_of_a_chat(part: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"\{type: image_url, image_url: \{url: \.\.\.\}\}"):
        chat(part)


def test_a_chat_shows_a_file() -> None:
    prompt, last = only(chat(text("a"), {"type": "image_url", "image_url": {"file_id": "file-1", "detail": "low"}}))
    assert last.texts_and_images == ("a", 0)
    (image,) = prompt.images
    where = "messages.[0].content.[1].image_url.file_id"
    assert (image.file_id, image.detail, image.where) == ("file-1", "low", where)


def test_large_images_are_decoded_as_a_whole_would_be() -> None:
    """They are decoded in pieces, of which only the last may be padded."""
    for size in (786_432, 786_433, 1_000_001):
        data = PNG + bytes(size)
        lines = base64.encodebytes(data).decode()
        for shown in (lines, lines.replace("\n", "")):
            assert image_of(shown, None, "x").data == data
    two = base64.b64encode(PNG + bytes((3 << 16) - 1 - len(PNG))).decode()
    assert two.endswith("=")
    with pytest.raises(ApiError, match="is not valid base64"):
        image_of(two + two, None, "x")


def test_long_head_of_a_data_url_is_refused_at_once() -> None:
    """It once kept a record of each parameter, and the interpreter's lock for seconds."""
    began = time.process_time()
    with pytest.raises(ApiError, match="must be a data URL in base64"):
        image_at("data:image/png" + ";a" * 8_000_000, None, "x")
    assert time.process_time() - began < 0.2


def test_spaces_in_base64_take_little_memory() -> None:
    data = PNG + bytes(2 << 20)
    whole = base64.b64encode(data).decode()
    text = " ".join([whole[at : at + 2] for at in range(0, len(whole), 2)])
    tracemalloc.start()
    try:
        assert image_of(text, None, "x").data == data
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()


def test_an_image_of_an_earlier_response_is_named_as_such() -> None:
    body = parse_body(json.dumps({"model": "m", "input": "B", "previous_response_id": f"resp_{'0' * 32}"}).encode())
    part = {"type": "input_image", "file_id": "file-1"}
    earlier = own_items(parse_body(json.dumps({"model": "m", "input": [{"role": "user", "content": [part]}]}).encode()))
    (image,) = only(to_generation(body, earlier, own_items(body), ()))[0].images
    assert image.where == "previous_response_id.[0].content.[0].file_id"


def test_the_url_of_a_response_as_a_chat_writes_it_is_refused_with_its_own_form() -> None:
    with pytest.raises(ApiError, match=r"got object\. Give the URL itself") as e:
        response({"type": "input_image", "image_url": {"url": URL}})
    assert e.value.param == "input.[0].content.[0].image_url"


def test_vllms_name_of_an_image_changes_nothing() -> None:
    named = chat({"type": "image_url", "image_url": {"url": URL}, "uuid": "a"})
    assert only(named)[0].images == only(chat({"type": "image_url", "image_url": {"url": URL}}))[0].images


def test_how_images_are_prepared_cannot_be_asked_for() -> None:
    parsed_bodies.chat(mm_processor_kwargs={})
    error = refused(parsed_bodies.chat, mm_processor_kwargs={"max_pixels": 100})
    assert error.param == "mm_processor_kwargs"
    assert "is not supported" in error.message


def test_an_image_of_the_assistant_is_refused_with_where_it_may_stand() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [IMAGE_BLOCK]}]
    with pytest.raises(ApiError, match="It may stand in a turn of the user and in the result of a tool alone"):
        parsed_bodies.message(turns)


def test_images_of_several_messages_are_counted_on() -> None:
    turns = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://x/y.png"}, text("And?")]},
    ]
    (prompt,) = parsed_bodies.chat(turns).prompts
    assert [each.texts_and_images for each in prompt.messages or ()] == [(0,), ("A cat.",), (1, "And?")]
    assert [(each.detail, each.url, each.where) for each in prompt.images] == [
        ("low", None, "messages.[0].content.[0].image_url"),
        ("auto", "https://x/y.png", "messages.[2].content.[0].image_url"),
    ]


def test_anthropics_tool_results_and_places_elsewhere_are_read() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("See"), image], "is_error": True}
    file = {"type": "image", "source": {"type": "file", "file_id": "file-1"}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, file]},
    ]
    (prompt,) = parsed_bodies.message(turns).prompts
    tool, user = (prompt.messages or ())[-2:]
    assert (tool.role, tool.texts_and_images, user.texts_and_images) == ("tool", ("Error: See", 0), (1,))
    assert [(each.url, each.file_id) for each in prompt.images] == [("https://x/y.png", None), (None, "file-1")]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png;base64,!!", "is not valid base64"),
        ("data:image/png,abc", "must be a data URL in base64"),
        ("http://example.com/a.png", "must be a data URL or an https URL"),
        ("file-abc", "it is 'file-abc'[.] An uploaded file is named as 'file_id'[.]$"),
        ("file:///etc/passwd", "must be a data URL or an https URL"),
        ("https://x/" + "a" * 9000, "at most 8192 characters"),
        ("data:image/png;base64,AAAA", "is not a PNG, JPEG, WebP or GIF"),
        (f"data:image/png;base64,{base64.b64encode(png_of_size(5, 5, bits=16)).decode()}", "has 16 bits a channel"),
        (f"data:image/png;base64,{base64.b64encode(png_of_size(2**31, 1)).decode()}", "a side may have 1 to 32768"),
    ],
)
def test_wrong_images_are_refused_with_their_place(url: str, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as e:
        chat(text("a"), {"type": "image_url", "image_url": {"url": url}})
    assert (e.value.status, e.value.param) == (400, "messages.[0].content.[1].image_url")


@pytest.mark.parametrize(
    ("ask", "param", "problem"),
    [
        (lambda: chat({"type": "image_url"}), "messages.[0].content", "without 'image_url'"),
        (lambda: chat({"type": "text", "text": "a", "image_url": URL}), "messages.[0].content", "Leave it out"),
        (
            lambda: chat({"type": "image_url", "image_url": {"url": URL, "detail": "best"}}),
            "messages.[0].content.[0].image_url.detail",
            "must be one of",
        ),
        (
            lambda: chat({"type": "image_url", "image_url": {"detail": "low"}}),
            "messages.[0].content.[0].image_url",
            "needs either 'url' or 'file_id'",
        ),
        (
            lambda: chat({"type": "image_url", "image_url": {"url": URL, "file_id": "f"}}),
            "messages.[0].content.[0].image_url",
            "needs either 'url' or 'file_id'",
        ),
        (lambda: response({"type": "input_image"}), "input.[0].content.[0]", "either 'image_url' or 'file_id'"),
        (
            lambda: response({"type": "input_image", "file_id": "f", "detail": "best"}),
            "input.[0].content.[0].detail",
            "auto, low, high, original",
        ),
        (lambda: response({"type": "input_text", "text": "a", "file_id": "f"}), None, "no such field"),
        (lambda: message({"type": "image", "source": {"type": "pdf"}}), "messages.[0].content.[0].source", "must be"),
        (
            lambda: message({"type": "image", "source": {"type": "base64"}}),
            "messages.[0].content.[0].source.data",
            "Missing",
        ),
    ],
)
def test_incomplete_images_name_the_field(ask: Callable[[], Generation], param: str | None, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as e:
        ask()
    assert e.value.status == 400
    assert param is None or e.value.param == param


def test_images_stand_in_no_thought_or_prediction_or_system_prompt() -> None:
    image = {"type": "image_url", "image_url": URL}
    with pytest.raises(ApiError, match="only text may stand there"):
        chat(text("a"), reasoning_content=[image])
    with pytest.raises(ApiError, match="only text may stand there"):
        parsed_bodies.message(system=[IMAGE_BLOCK])


def test_one_image_too_many_is_named() -> None:
    images = [{"type": "image_url", "image_url": URL}] * (MAX_IMAGES + 1)
    with pytest.raises(ApiError, match=r"content.\[64\].image_url' is one image too many: at most 64"):
        chat(*images)
