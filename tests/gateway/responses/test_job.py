"""The events of a job's text: the same ones, however the text came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation import PLAIN_READING, OutputReading, ToolUse
from gateway.responses.draft import ResponseDraft, ResponseGeneration
from gateway.responses.job import BackgroundJob, JobReader, error_of, status_of
from gateway.responses.output import ResponseOutput
from shared.formats import Tool, ToolChoice
from shared.messages import BatchResult

DRAFT = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[])
Events = list[tuple[str, dict[str, Any]]]
USE = ToolUse((Tool("f", None), Tool("g", None)), ToolChoice("auto"))
# Pieces of what models write, whole and broken.
FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>\n",
        '{"name": "f", "arguments": {"a": 1}}',
        "\n</tool_call>",
        "{",
        "é",
        "word ",
        "long " * 20,
        "\n",
        '{"name": "g", "arguments": {"x": "' + 70 * "y" + '"}}',
        "<tool_call>",
    ]
)


def test_job_keeps_which_calls_are_told_and_not_where_schemas_stood() -> None:
    use = ToolUse(
        USE.tools, USE.choice, is_exclusive=True, schema_places=("tools.[0].parameters", "tools.[1].parameters")
    )
    generation = cast("ResponseGeneration", SimpleNamespace(reading=None, tools=use, includes_reasoning=True))
    kept = msgspec.json.decode(msgspec.json.encode(BackgroundJob.of(generation, 1, 0.0)), type=BackgroundJob).tools
    assert kept is not None
    assert (kept, kept.schema_places) == (use, ())


def reading(is_parallel: bool = True, includes_reasoning: bool = True) -> OutputReading:
    use = ToolUse(USE.tools, USE.choice, is_parallel)
    job = BackgroundJob(
        stream_seq=1, deadline=0, chat_format="hermes-thinking", tools=use, includes_reasoning=includes_reasoning
    )
    return job.reading


def events_of(text: str, cuts: list[int], how: OutputReading, in_reasoning: bool) -> Events:
    """Read a text as it grows to each of these lengths, and then whole."""
    events: Events = []
    output = ResponseOutput(DRAFT, lambda kind, fields: events.append((kind, fields)))
    reader = JobReader(how, output)
    for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        assert reader.read(text[:end], in_reasoning=in_reasoning)
    reader.finish(is_complete=True)
    return events


@settings(max_examples=60)
@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    cuts=st.lists(st.integers(0, 600), max_size=8),
    is_parallel=st.booleans(),
    includes_reasoning=st.booleans(),
    in_reasoning=st.booleans(),
)
def test_events_depend_on_the_text_alone(
    fragments: list[str], cuts: list[int], is_parallel: bool, includes_reasoning: bool, in_reasoning: bool
) -> None:
    text, how = "".join(fragments), reading(is_parallel, includes_reasoning)
    whole = events_of(text, [], how, in_reasoning)
    assert events_of(text, cuts, how, in_reasoning) == whole
    assert events_of(text, list(range(len(text))), how, in_reasoning) == whole
    items = [fields["item"] for kind, fields in whole if kind == "response.output_item.done"]
    assert items
    assert includes_reasoning or all(item["type"] != "reasoning" for item in items)
    assert is_parallel or sum(item["type"] == "function_call" for item in items) <= 1


def test_first_text_of_an_item_is_told_at_once() -> None:
    events = events_of("x" * 100, [1], PLAIN_READING, False)
    deltas = [fields["delta"] for kind, fields in events if kind == "response.output_text.delta"]
    assert list(map(len, deltas)) == [1, 2, 4, 8, 16, 32, 32, 5]


class Copied(str):
    """A text that counts the characters of those that are made of it."""

    num_characters = 0

    def __add__(self, other: str) -> Copied:
        Copied.num_characters += len(self) + len(other)
        return Copied(super().__add__(other))

    def __getitem__(self, key: Any) -> Copied:
        part = Copied(super().__getitem__(key))
        Copied.num_characters += len(part)
        return part


def test_long_text_that_comes_at_once_is_copied_a_few_times_and_not_once_for_each_piece() -> None:
    reader = JobReader(reading(), ResponseOutput(DRAFT))
    reader._pending = Copied("")
    Copied.num_characters = 0
    assert reader.read("word " * 20_000, in_reasoning=False)
    reader.finish(is_complete=True)
    assert 100_000 < Copied.num_characters < 400_000


def test_text_that_begins_otherwise_is_not_read() -> None:
    reader = JobReader(reading(), ResponseOutput(DRAFT))
    assert reader.read("", in_reasoning=False)
    assert reader.read("abc", in_reasoning=True)
    assert not reader.read("abd", in_reasoning=True)
    assert not reader.read("ax", in_reasoning=True)
    # Less than was there before is nothing new.
    assert reader.read("ab", in_reasoning=True)
    assert reader.text == "abc"


def test_usage_of_a_job_tells_which_of_its_prompts_tokens_were_cached() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 5}
    result = BatchResult(id="r", model="m", tenant="t", text="abc", finish="stop", **counts)
    assert msgspec.to_builtins(JobReader(reading(), ResponseOutput(DRAFT)).usage(result)) == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_every_end_of_a_job_has_a_status() -> None:
    statuses = {
        finish: status_of(BatchResult(id="r", model="m", tenant="t", text="", finish=finish))  # type: ignore[arg-type]
        for finish in ("stop", "length", "cancelled", "expired", "failed")
    }
    assert statuses == {
        "stop": "completed", "length": "incomplete", "cancelled": "cancelled", "expired": "failed", "failed": "failed",
    }  # fmt: skip
    error = error_of(BatchResult(id="r", model="m", tenant="t", text="", finish="expired"))
    assert error is not None
    assert "in time" in error.message
