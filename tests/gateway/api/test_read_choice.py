"""Chat answers whose text is read, streamed and whole: what clients get of content, reasoning and calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, ResponseHead
from gateway.api.chat_answers import AnswerIdentity
from gateway.api.output_reading import reading_of
from gateway.api.read_choice import ReasoningTokens
from gateway.api.whole import WholeAnswer
from gateway.generation import OutputReading, ToolUse
from shared.formats import Tool, ToolChoice
from shared.formats.events import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from shared.messages import Delta, Finish, TokenLogprob, Usage
from tests.gateway.api.scripted_reader import ScriptedReader
from tests.gateway.api.test_streamed import Streamed, events
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.parsed_bodies import generation

IDENTITY = AnswerIdentity("chatcmpl-1", "chat", "m", 7)
READING = OutputReading(ScriptedReader)
STOP = Finish("stop", Usage(3, 5))

Pieces = list[str]


def deltas(pieces: Pieces, finish: Finish = STOP) -> list[Delta]:
    """One token a piece, then the end."""
    tokens = [Delta("r", 0, position, (position,), piece) for position, piece in enumerate(pieces)]
    return [*tokens, Delta("r", 0, len(pieces), finish=finish)]


async def streamed(choices: list[list[Delta]], reading: OutputReading = READING) -> list[dict[str, Any]]:
    """Return the JSON of all chunks."""
    answer = Streamed(len(choices), reading, IDENTITY)
    for index, said in enumerate(choices):
        for delta in said:
            answer.answer.sinks[index].deliver(delta)
    await asyncio.sleep(0)
    *chunks, done = events(answer.sent)
    assert done == b"data: [DONE]"
    return [json.loads(chunk[6:]) for chunk in chunks]


async def whole(choices: list[list[Delta]], reading: OutputReading = READING) -> dict[str, Any]:
    """Return the JSON of the answer."""
    exchange, _, transport = kept_exchange()
    asking = generation(n=len(choices), reading=reading)
    answer = WholeAnswer(Asked(exchange, asking, ResponseHead("req_1", 0.0), Principal("k", "t")), IDENTITY)
    for index, said in enumerate(choices):
        for delta in said:
            answer.sinks[index].deliver(delta)
    return transport.body()  # type: ignore[no-any-return]


def chunk_deltas(chunks: list[dict[str, Any]], choice: int = 0) -> list[dict[str, Any]]:
    return [entry["delta"] for chunk in chunks for entry in chunk["choices"] if entry["index"] == choice]


def without_ids(value: Any) -> Any:
    """Leave out what is drawn at random, after a look at it."""
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    assert value.get("id", "call_").startswith("call_")
    return {key: without_ids(entry) for key, entry in value.items() if key != "id"}


async def test_streamed_call_has_id_name_and_argument_pieces_and_its_own_finish_reason() -> None:
    chunks = await streamed([deltas(["S:add", 'A:{"a"', "A:: 1}"])])
    assert without_ids(chunk_deltas(chunks)) == [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_whole_answer_with_a_call_has_no_content() -> None:
    [choice] = (await whole([deltas(["S:add", "A:{}"])]))["choices"]
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert without_ids(choice["message"]) == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [call],
    }
    assert choice["finish_reason"] == "tool_calls"


async def test_reasoning_stands_under_both_names_before_the_content() -> None:
    pieces = ["R:why\n", "R: so", "C:yes"]
    chunks = await streamed([deltas(pieces)])
    assert chunk_deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "why\n", "reasoning": "why\n"},
        {"reasoning_content": " so", "reasoning": " so"},
        {"content": "yes"},
        {},
    ]
    [choice] = (await whole([deltas(pieces)]))["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "reasoning_content": "why\n so",
        "reasoning": "why\n so",
    }
    assert choice["finish_reason"] == "stop"


async def test_text_begins_where_the_first_delta_says() -> None:
    claim = Delta("r", 0, 0, prompt_tokens=3, in_reasoning=True)
    chunks = await streamed([[claim, *deltas(["T:a"])], deltas(["T:a"])])
    assert chunk_deltas(chunks, 0)[1] == {"reasoning_content": "a", "reasoning": "a"}
    assert chunk_deltas(chunks, 1)[1] == {"content": "a"}
    [choice] = (await whole([[claim, *deltas(["T:a"])]]))["choices"]
    assert choice["message"]["reasoning"] == "a"


async def test_reasoning_that_is_not_wanted_is_left_out_and_still_counted() -> None:
    reading = OutputReading(ScriptedReader, includes_reasoning=False)
    body = await whole([deltas(["R:why", "R: so", "C:yes"])], reading)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["X:<think>", "R:a", "R:b", "X:</think>", "C:c"], 4),
        (["C:a", "X:-", "C:b"], 0),
        (["R:a", "X:</think>"], 2),
        (["R:aaa|C:c"], 1),
        (["C:a", "X:<think>", "R:b", "X:</think>", "S:f", "A:{}"], 2),
    ],
)
async def test_reasoning_tokens_count_their_marks(pieces: Pieces, count: int) -> None:
    usage = (await whole([deltas(pieces)]))["usage"]
    assert usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0) == count


async def test_cut_call_is_delivered_as_far_as_it_goes() -> None:
    cut = Finish("length", Usage(3, 2))
    [choice] = (await whole([deltas(["S:add", 'A:{"a'], cut)]))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'
    assert choice["finish_reason"] == "length"
    chunks = await streamed([deltas(["S:add", 'A:{"a'], cut)])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_what_the_reader_held_back_comes_before_the_end() -> None:
    chunks = await streamed([deltas(["E:<tool"])])
    assert chunk_deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "<tool"}, {}]


async def test_answer_without_text_opens_and_ends() -> None:
    assert chunk_deltas(await streamed([deltas([])])) == [{"role": "assistant", "content": ""}, {}]
    assert (await whole([deltas([])]))["choices"][0]["message"]["content"] == ""


async def test_choices_have_calls_and_ids_of_their_own() -> None:
    pieces = ["S:f", "A:{}", "S:g", "A:[]"]
    choices = (await whole([deltas(pieces), deltas(pieces)]))["choices"]
    calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
    assert [call["function"]["name"] for call in calls] == ["f", "g", "f", "g"]
    assert len({call["id"] for call in calls}) == 4
    chunks = await streamed([deltas(pieces), deltas(pieces)])
    for choice in range(2):
        said = [call for delta in chunk_deltas(chunks, choice) for call in delta.get("tool_calls", ())]
        assert [(call["index"], call["function"]["arguments"]) for call in said] == [
            (0, ""),
            (0, "{}"),
            (1, ""),
            (1, "[]"),
        ]


async def test_calls_beyond_those_wanted_are_left_out() -> None:
    reading = OutputReading(ScriptedReader, max_calls=1)
    [choice] = (await whole([deltas(["S:f", "A:{}", "S:g", "A:[]"])], reading))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


async def test_older_form_tells_one_function_call() -> None:
    reading = OutputReading(ScriptedReader, max_calls=1, is_function_call=True)
    pieces = ["S:f", "A:{", "A:}"]
    [choice] = (await whole([deltas(pieces)], reading))["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    chunks = await streamed([deltas(pieces)], reading)
    assert chunk_deltas(chunks) == [
        {"role": "assistant", "content": None},
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": "{"}},
        {"function_call": {"arguments": "}"}},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_log_probabilities_of_all_tokens_are_told_once() -> None:
    pieces = ["X:<think>", "R:a", "X:</think>", "S:f", "A:{}", "X:</call>"]
    said = [
        Delta("r", 0, position, (position,), piece, logprobs=(TokenLogprob(position, str(position), b"t", -1.0),))
        for position, piece in enumerate(pieces)
    ]
    said.append(Delta("r", 0, len(pieces), finish=STOP))
    chunks = await streamed([said])
    streamed_tokens = [
        entry["token"] for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]
    ]
    assert streamed_tokens == ["0", "1", "2", "3", "4", "5"]
    [choice] = (await whole([said]))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == streamed_tokens


async def test_first_chunks_are_written_at_once_and_the_rest_together() -> None:
    answer = Streamed(1, READING, IDENTITY)
    said = deltas(["X:<think>", "R:a", "R:b", "R:c"])
    for delta in said[:2]:
        answer.answer.sinks[0].deliver(delta)
    assert len(answer.transport.writes) == 1
    for delta in said[2:4]:
        answer.answer.sinks[0].deliver(delta)
    assert len(answer.transport.writes) == 1
    await asyncio.sleep(0.01)
    assert len(answer.transport.writes) == 2


R, C = ReasoningText("rrrr"), ContentText("cccc")
CALL, ARGUMENTS = ToolCallStart(0, "nn"), ToolCallArguments(0, "aaaa")


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        # Each step: its tokens, and what was read in it.
        ([(3, [C])], 0),
        ([(3, [R])], 3),
        ([(3, [R]), (2, [R]), (4, [C]), (1, [C])], 5),
        # Marks: the opening one, and the closing one behind reasoning.
        ([(1, []), (2, [R])], 3),
        ([(2, [R]), (1, []), (3, [C])], 3),
        ([(2, [R]), (1, []), (1, []), (3, [R])], 7),
        ([(1, []), (2, [C])], 0),
        # Those before a call are the call's.
        ([(2, [R]), (4, []), (1, [CALL])], 2),
        ([(2, [R]), (4, []), (1, [ARGUMENTS])], 6),
        # A step of several is shared out by length.
        ([(4, [R, C])], 2),
        ([(4, [ReasoningText("r"), ContentText("ccc")])], 1),
        ([(3, [R, ToolCallStart(0, "nnnn")])], 2),
        ([(4, [C, R])], 2),
        ([(4, [C, R]), (1, []), (1, [C])], 3),
        ([(4, [R, C]), (1, []), (1, [C])], 2),
        ([(2, [R]), (1, []), (4, [R, C])], 5),
        # What is left at the end.
        ([(2, [R]), (3, [])], 5),
        ([(2, [C]), (3, [])], 0),
        ([(2, [R]), (1, [C]), (3, [])], 2),
        ([(3, [])], 0),
        ([], 0),
    ],
)
def test_tokens_are_counted(steps: list[tuple[int, list[OutputEvent]]], count: int) -> None:
    tokens = ReasoningTokens()
    for num_tokens, read in steps:
        tokens.note(num_tokens, read)
    tokens.end()
    assert tokens.count == count
    tokens.end()
    assert tokens.count == count


@pytest.mark.parametrize(("reason", "content"), [("length", "Hm"), ("stop", 'Hm <tool_call>{"name": "get_wea')])
async def test_beginning_of_a_call_is_left_out_where_a_limit_has_cut_it(reason: Any, content: str) -> None:
    use = ToolUse((Tool("get_weather", None),), ToolChoice("auto"))
    reading = reading_of("hermes", use, includes_reasoning=True)
    said = deltas(["Hm", " <tool_call>", '{"name": "get', "_wea"], Finish(reason, Usage(3, 5)))
    told = chunk_deltas(await streamed([said], reading))
    assert "".join(each.get("content") or "" for each in told) == content
    message = (await whole([said], reading))["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (content, None)
