from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.formats import ContentText, PlainReader, ReasoningText, format_named, format_names
from shared.formats.call_reading import MAX_NAME_CHARACTERS, CallableTools
from shared.formats.tools import Tool
from tests.shared.formats.reading import read, understood
from tests.shared.formats.tools import tools
from tests.shared.formats.writers import WRITERS

_SIGNS = ["{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "=", " ", "\n", "</", "-", "."]
_VALUES = ["\\u00e9", "\\ud83d", "1", "true", "🌍", '"name": "get"', '{"city": "x"}']
_NAMES = ["fly", "fly.to", "get", "get_weather", "search", "city", "name", "arguments", "parameters", "function"]
_TAGS = ["```json", "call:", "to=functions.", "<function=get>", "<parameter=city>", "</parameter>", "</function>"]


def _scraps_of(name: str) -> list[str]:
    spoken = format_named(name)
    markup = [WRITERS[name]([("get_weather", {"city": "a"})])] if name in WRITERS else []
    tags = [*spoken.reasoning.opens, *spoken.reasoning.closes] if spoken.reasoning else []
    opens = [each for form in spoken.calls for each in (*form.opens, *form.closes)]
    return [*_SIGNS, *_VALUES, *_NAMES, *_TAGS, *spoken.tokens, *spoken.dropped, *tags, *opens, *markup]


def _check_a_random_text(name: str, chance: random.Random) -> None:
    text = "".join(chance.choices(_scraps_of(name), k=chance.randint(1, 24)))
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 6))))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for offered, is_exclusive in ((tools(), False), (tools(), True), ([], False)):
        for starts in (False, True):
            how = {"starts_in_reasoning": starts, "is_exclusive": is_exclusive}
            whole = read(format_named(name), [text], offered, **how)
            assert read(format_named(name), pieces, offered, **how) == whole, (text, pieces)
            assert read(format_named(name), list(text), offered, **how) == whole, text


@pytest.mark.parametrize("name", format_names())
def test_random_markup_is_read_the_same_however_it_is_cut(name: str) -> None:
    chance = random.Random(name)
    for _ in range(8):
        _check_a_random_text(name, chance)


@pytest.mark.slow
@pytest.mark.parametrize("name", format_names())
def test_much_random_markup_is_read_the_same_however_it_is_cut(name: str) -> None:
    chance = random.Random(f"much {name}")
    for _ in range(600):
        _check_a_random_text(name, chance)


@pytest.mark.parametrize("name", format_names())
@settings(max_examples=4, derandomize=True, database=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{"), min_size=1))
def test_text_without_markup_is_content(name: str, text: str) -> None:
    if not text.lstrip().startswith("to=functions."):
        assert read(format_named(name), list(text), tools()) == [ContentText(text)]


@pytest.mark.parametrize("name", format_names())
def test_text_is_told_at_once_but_for_the_beginning_of_a_marker(name: str) -> None:
    reader = format_named(name).reader(tools())
    told = "".join(event.text for event in reader.feed("One, two,") if isinstance(event, ContentText))
    told += "".join(event.text for event in reader.feed(" three <") if isinstance(event, ContentText))
    assert told.startswith("One, two, three")


_NOT_OFFERED = ("fly_to", {"city": "Rome", "days": 2})


@pytest.mark.parametrize("name", WRITERS)
def test_call_of_a_tool_that_was_not_offered_is_handed_on_unless_others_are_forbidden(name: str) -> None:
    text = WRITERS[name]([_NOT_OFFERED])
    said = understood(read(format_named(name), list(text), tools()))
    assert [(called, json.loads(arguments)) for called, arguments in said.calls] == [_NOT_OFFERED]
    assert said.content == ""
    forbidden = understood(read(format_named(name), list(text), tools(), is_exclusive=True))
    assert (forbidden.calls, forbidden.content) == ((), text)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("called", ["x" * 65, "../fly", "flä", "fly.", "-fly"])
def test_what_no_tool_can_be_called_is_no_name(name: str, called: str) -> None:
    text = WRITERS[name]([(called, {"city": "Rome"})])
    assert understood(read(format_named(name), list(text), tools())).calls == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"%s": 1, "name": "get"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\"\\"%s", "arguments": {}}</tool_call>'),
        ("qwen-coder", "<function=get>\n<parameter=%s>\n1\n</parameter>\n</function>"),
        ("glm", "<tool_call>%s</tool_call>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:%s<|tool_call_argument_begin|>{}"),
        ("harmony", "<|channel|>commentary to=functions.get %s<|message|>{}<|call|>"),
        ("mistral", "[TOOL_CALLS]get[CALL_ID]%s[ARGS]{}"),
    ],
)
@pytest.mark.parametrize("length", [62, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
def test_bounds_of_what_is_held_back_are_the_same_however_the_text_is_cut(name: str, text: str, length: int) -> None:
    text %= "1" * length
    whole = read(format_named(name), [text], tools())
    for size in (1, 7, 64):
        assert read(format_named(name), [text[at : at + size] for at in range(0, len(text), size)], tools()) == whole


def _seconds_of_reading(name: str, text: str) -> float:
    begin = time.process_time()
    read(format_named(name), [text[at : at + 7] for at in range(0, len(text), 7)], tools())
    return time.process_time() - begin


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in format_names() if name not in ("glm", "llama-json")]


@pytest.mark.parametrize("name", ["glm", "llama-json", *_SLOW])
def test_reading_takes_time_linear_in_the_text(name: str) -> None:
    opens = [each for form in format_named(name).calls for each in form.opens] or ["<"]
    for scrap in (f"{opens[0]} ", "\n", "<", '{"arguments": ', "a" * 9):
        texts = [(scrap * length)[:length] for length in (2_000, 16_000)]
        # The least of three: the machine may be busy in one of them.
        seconds = [min(_seconds_of_reading(name, text) for _ in range(3)) for text in texts]
        # Eight times the text: quadratic time would be 64 times as much.
        assert seconds[1] < 24 * seconds[0] + 0.05, (scrap, seconds)


def test_answer_without_anything_to_read_is_content_as_it_comes() -> None:
    assert isinstance(format_named("hermes").reader(), PlainReader)
    assert isinstance(format_named("hermes-thinking").reader(), type(format_named("glm").reader()))


def test_arguments_stream_as_they_come() -> None:
    reader = format_named("qwen-coder").reader(tools())
    reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nNew")
    assert understood(reader.feed(" York and")[:0]).calls == ()
    (event,) = reader.feed(" more")
    assert getattr(event, "text", "") == " more"
    reader = format_named("lfm").reader(tools())
    # An escape is passed on with its last digit.
    events = reader.feed('<|tool_call_start|>[get_weather(city="caf\\u00e')
    assert understood([*events, *reader.feed("9")]).calls == (("get_weather", '{"city": "caf\\u00e9'),)


@pytest.mark.parametrize(("types", "arguments"), [(["string", "null"], '{"page": "5"}'), (["integer"], '{"page": 5}')])
def test_number_without_quotes_is_a_text_where_the_schema_allows_no_number(types: list[str], arguments: str) -> None:
    offered = [Tool("look", json.dumps({"type": "object", "properties": {"page": {"type": types}}}))]
    text = WRITERS["qwen-coder"]([("look", {"page": 5})])
    assert understood(read(format_named("qwen-coder"), [text], offered)).calls == (("look", arguments),)


def test_reasoning_streams_as_it_comes() -> None:
    reader = format_named("hermes-thinking").reader(starts_in_reasoning=True)
    # White space where reasoning begins is markup, and where an answer begins it is text.
    assert reader.feed("\n I") == [ReasoningText("I")]
    assert read(format_named("hermes"), [" Hi"], tools(), is_exclusive=True) == [ContentText(" Hi")]
    assert reader.feed(" think ") == [ReasoningText(" think")]
    assert reader.feed("</think>") == []
    assert reader.feed("\n\nHi ") == [ContentText("Hi ")]
    assert reader.finish() == []


@pytest.mark.parametrize("name", ["glm", "hermes-thinking", "mistral-thinking"])
def test_call_ends_reasoning_whose_close_then_says_nothing_once(name: str) -> None:
    spoken = format_named(name)
    opens, closes = spoken.reasoning.opens[0], spoken.reasoning.closes[0]
    call = WRITERS[name]([("get_weather", {"city": "a"})])
    said = understood(read(spoken, [f"{opens}hm{call} {closes} after {closes} more"], tools()))
    assert (said.reasoning, said.content) == ("hm", f"after {closes} more")
    assert [called for called, _ in said.calls] == ["get_weather"]
    said = understood(read(spoken, [f"{opens}hm{call}{call} {closes} after"], tools()))
    assert (said.reasoning, said.content, len(said.calls)) == ("hm", "after", 2)


@pytest.mark.parametrize("name", ["mistral-list", "lfm"])
def test_what_follows_a_call_and_is_none_is_told(name: str) -> None:
    call = WRITERS[name]([("get_weather", {"city": "a"})]).rpartition("]")[0]
    said = understood(read(format_named(name), [call, ', {"x": 1} and more'], tools()))
    assert said.content.lstrip(", ") == '{"x": 1} and more'
    assert [called for called, _ in said.calls] == ["get_weather"]


_WITH_SECTIONS = ("deepseek-v3", "deepseek-v3.2", "kimi", "minimax", "mistral-list", "llama-json", "llama-pythonic")


@pytest.mark.parametrize("name", _WITH_SECTIONS)
def test_answer_that_is_cut_within_a_later_call_tells_none_of_its_markup(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"city": "a"}), ("search", {"query": "b"})])
    cut = [understood(read(format_named(name), list(text[:end]), tools())) for end in range(len(text))]
    assert {each.content for each in cut if each.calls} == {""}
    assert {len(each.calls) for each in cut} == {0, 1, 2}


# These open calls without a marker, or write them as a message to a tool.
_WITHOUT_MARKER = ("llama-json", "llama-pythonic", "harmony")


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - _WITHOUT_MARKER))
def test_answer_that_a_limit_cuts_before_the_arguments_tells_no_markup(name: str) -> None:
    text = f"Hm {WRITERS[name]([('get_weather', {'city': 'a'})])}"
    opens = [each for form in format_named(name).calls for each in form.opens]
    num_markers = 0
    for end in range(len("Hm"), text.index("city")):
        reader = format_named(name).reader(tools(), starts_in_reasoning=False)
        events = [event for character in text[:end] for event in reader.feed(character)]
        said = understood([*events, *reader.finish(is_cut=True)])
        if said.content != "Hm":
            # A marker that is not whole yet may be text.
            assert any(opening.startswith(text[len("Hm ") : end].lstrip()) for opening in opens)
            assert not said.calls
            num_markers += 1
    assert num_markers <= max(map(len, opens))


@pytest.mark.parametrize("text", ["Hm <tool_call>so", 'Hm <tool_call>{"name": 1', "Hm <tool"])
def test_markup_that_cannot_become_a_call_stays_where_a_limit_cuts_it(text: str) -> None:
    reader = format_named("hermes").reader(tools(), starts_in_reasoning=False)
    assert understood([*reader.feed(text), *reader.finish(is_cut=True)]).content == text


@pytest.mark.parametrize("name", ["deepseek-v3.1", "gemma", "llama-json"])
def test_marker_that_says_nothing_leaves_the_space_around_it(name: str) -> None:
    spoken = format_named(name)
    assert read(spoken, [f"one {spoken.dropped[0]} two"], tools()) == [ContentText("one  two")]


@pytest.mark.parametrize(
    "call",
    [
        '{"type": "function", "name": "get_weather", "arguments": {"city": "a"}}',
        '{"id": "x", "name": "get_weather", "arguments": {"city": "a"}}',
        '{"name": "get_weather", "index": 0, "arguments": {"city": "a"}}',
        '{"arguments": {"city": "a"}, "type": "function", "name": "get_weather"}',
        '{"name": "get_weather" , "arguments" : {"city": "a"} }',
    ],
)
def test_members_of_a_call_that_say_nothing_are_not_its_arguments(call: str) -> None:
    said = understood(read(format_named("hermes"), [f"<tool_call>\n{call}\n</tool_call>"], tools()))
    assert (said.calls, said.content) == ((("get_weather", '{"city": "a"}'),), "")
    # They are none where there are no others either.
    said = understood(
        read(format_named("hermes"), ['<tool_call>{"type": "function", "name": "get"}</tool_call>'], tools())
    )
    assert said.calls == (("get", "{}"),)


@pytest.mark.parametrize(
    "call",
    ["{}", '{"id": "x"}', '{"arguments": {"city": "a"}, "parameters": {"city": "b"}, "name": "get_weather"}'],
)
def test_object_without_a_name_or_with_arguments_twice_is_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert read(format_named("hermes"), list(text), tools()) == [ContentText(text)]


def test_space_before_arguments_is_no_part_of_them() -> None:
    text = '[TOOL_CALLS]get_weather[ARGS] {"city": "a"}'
    assert understood(read(format_named("mistral"), list(text), tools())).calls == (("get_weather", '{"city": "a"}'),)


@pytest.mark.parametrize("name", ["hermes", "llama-json"])
def test_object_with_a_member_that_no_call_has_is_text(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"city": "a"})]).replace(
        '{"name"', '{"name": "get_weather", "x": 1, "name"', 1
    )
    said = understood(read(format_named(name), [text], tools()))
    assert ('"x": 1' in said.content, said.calls) == (True, ())


def test_name_that_was_not_offered_is_no_longer_than_a_tool_s_may_be_however_long_those_offered_are() -> None:
    tools = CallableTools([Tool("x" * (MAX_NAME_CHARACTERS + 10))], is_exclusive=False)
    longest = "y" * MAX_NAME_CHARACTERS
    assert tools.named(longest) == Tool(longest)
    assert tools.named(longest + "y") is None
    assert CallableTools([Tool("x")], is_exclusive=True).named(longest) is None
