"""The parameters that change nothing here, whatever their value, so that a client may leave them in."""

from __future__ import annotations

from gateway.api.schemas.row import GENERATION, Kind, Row, Use


def _row(name: str, note: str, example: object, kinds: tuple[Kind, ...] = GENERATION) -> Row:
    return Row(name, kinds, note, example, use=Use.IGNORED)


_MESSAGE = (Kind.MESSAGE,)

IGNORED = (
    _row("store", "Answers of this endpoint are not kept for later.", True),
    _row("metadata", "Labels of kept answers; none are kept.", {"task": "a"}),
    _row("service_tier", "There is one tier. The lane of a request is chosen by how it is sent.", "auto"),
    _row("safety_identifier", "Names the end user to OpenAI.", "someone"),
    _row("prompt_cache_key", "Prompts are cached by their content, and workers are chosen by what they hold.", "a"),
    _row("prompt_cache_retention", "The cache keeps what is used, for as long as it has room.", "24h"),
    _row("prompt_cache_options", "The cache keeps what is used, for as long as it has room.", {"ttl": "30m"}),
    _row("cache_prompt", "Prompts are always cached.", True),
    _row("id_slot", "A worker chooses the slot.", -1),
    _row("n_cache_reuse", "Prompts are cached in blocks.", 0),
    _row("slot_id", "A worker chooses the slot.", -1),
    _row("keep_alive", "Models stay loaded.", "5m"),
    _row("timings_per_token", "Times are in the metrics.", True),
    _row("return_progress", "A stream says nothing of a prompt's progress.", True),
    _row("request_id", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    _row("rid", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    _row("data_parallel_rank", "The queue chooses the worker.", 0),
    _row("guided_decoding_backend", "There is one implementation of structured output.", "auto"),
    _row("disable_fallback", "There is one implementation.", True, (Kind.STRUCTURED_OUTPUTS,)),
    _row("mm_processor_kwargs", "For images and sounds, which are not read.", {"fps": 1}),
    _row("include_obfuscation", "Streams are never padded.", False, (Kind.STREAM_OPTIONS,)),
    _row("annotations", "Notes of an earlier answer about its sources; no template reads them.", [], _MESSAGE),
    _row("id", "Name of an earlier answer.", "msg_1", _MESSAGE),
    _row("provider_specific_fields", "LiteLLM's notes on an earlier answer.", {"a": 1}, _MESSAGE),
    _row("reasoning_details", "The text stands in `reasoning` too.", [], _MESSAGE),
    _row("thinking_blocks", "The text stands in `reasoning_content` too.", [], _MESSAGE),
    _row("signature", "Proves to Anthropic that its model has thought so.", "a", (Kind.CONTENT_PART,)),
    _row("closed", "Whether the thought was complete.", True, (Kind.CONTENT_PART,)),
    _row("parsed", "OpenAI's SDK puts it beside the content that it was made of.", {"a": 1}, _MESSAGE),
    _row("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}, (Kind.CALLED_FUNCTION,)),
    _row("index", "Calls stand in their order.", 0, (Kind.TOOL_CALL,)),
    _row("provider_specific_fields", "LiteLLM's notes on an earlier call.", {"a": 1}, (Kind.TOOL_CALL,)),
    _row("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (Kind.TOOL, Kind.FUNCTION)),
    _row("weight", "Used in training only.", 1, _MESSAGE),
    _row("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (Kind.MESSAGE, Kind.CONTENT_PART)),
    _row("prompt_cache_breakpoint", "Prompts are always cached.", {"mode": "explicit"}, (Kind.CONTENT_PART,)),
    _row("annotations", "Notes of an earlier answer about its sources.", [], (Kind.CONTENT_PART,)),
)
