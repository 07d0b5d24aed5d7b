"""The parameters that change nothing here, whatever their value, so that a client may leave them in."""

from __future__ import annotations

from gateway.api.schemas.row import Kind, ignored

_MESSAGE = (Kind.MESSAGE,)

IGNORED = (
    ignored("store", "Answers of this endpoint are not kept for later.", True),
    ignored("metadata", "Labels of kept answers; none are kept.", {"task": "a"}),
    ignored("service_tier", "There is one tier. The lane of a request is chosen by how it is sent.", "auto"),
    ignored("safety_identifier", "Names the end user to OpenAI.", "someone"),
    ignored("prompt_cache_key", "Prompts are cached by their content, and workers are chosen by what they hold.", "a"),
    ignored("prompt_cache_retention", "The cache keeps what is used, for as long as it has room.", "24h"),
    ignored("prompt_cache_options", "The cache keeps what is used, for as long as it has room.", {"ttl": "30m"}),
    ignored("cache_prompt", "Prompts are always cached.", True),
    ignored("id_slot", "A worker chooses the slot.", -1),
    ignored("n_cache_reuse", "Prompts are cached in blocks.", 0),
    ignored("slot_id", "A worker chooses the slot.", -1),
    ignored("keep_alive", "Models stay loaded.", "5m"),
    ignored("timings_per_token", "Times are in the metrics.", True),
    ignored("return_progress", "A stream says nothing of a prompt's progress.", True),
    ignored("request_id", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    ignored("rid", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    ignored("data_parallel_rank", "The queue chooses the worker.", 0),
    ignored("guided_decoding_backend", "There is one implementation of structured output.", "auto"),
    ignored("disable_fallback", "There is one implementation.", True, (Kind.STRUCTURED_OUTPUTS,)),
    ignored("mm_processor_kwargs", "For images and sounds, which are not read.", {"fps": 1}),
    ignored("include_obfuscation", "Streams are never padded.", False, (Kind.STREAM_OPTIONS,)),
    ignored("annotations", "Notes of an earlier answer about its sources; no template reads them.", [], _MESSAGE),
    ignored("id", "Name of an earlier answer.", "msg_1", _MESSAGE),
    ignored("provider_specific_fields", "LiteLLM's notes on an earlier answer.", {"a": 1}, _MESSAGE),
    ignored("reasoning_details", "The text stands in `reasoning` too.", [], _MESSAGE),
    ignored("thinking_blocks", "The text stands in `reasoning_content` too.", [], _MESSAGE),
    ignored("signature", "Proves to Anthropic that its model has thought so.", "a", (Kind.CONTENT_PART,)),
    ignored("closed", "Whether the thought was complete.", True, (Kind.CONTENT_PART,)),
    ignored("parsed", "OpenAI's SDK puts it beside the content that it was made of.", {"a": 1}, _MESSAGE),
    ignored("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}, (Kind.CALLED_FUNCTION,)),
    ignored("index", "Calls stand in their order.", 0, (Kind.TOOL_CALL,)),
    ignored("provider_specific_fields", "LiteLLM's notes on an earlier call.", {"a": 1}, (Kind.TOOL_CALL,)),
    ignored("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (Kind.TOOL, Kind.FUNCTION)),
    ignored("weight", "Used in training only.", 1, _MESSAGE),
    ignored("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (Kind.MESSAGE, Kind.CONTENT_PART)),
    ignored("prompt_cache_breakpoint", "Prompts are always cached.", {"mode": "explicit"}, (Kind.CONTENT_PART,)),
    ignored("annotations", "Notes of an earlier answer about its sources.", [], (Kind.CONTENT_PART,)),
)
