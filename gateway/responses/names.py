"""The names in the bodies of `/v1/responses`: what is served, and what becomes of the others.

Clients send back what they were sent, by this server or by OpenAI's: what only says something about an item is
ignored. `request_checks` says which fields an item of each type has.
"""

from __future__ import annotations

from gateway.api.schemas.bodies import OPENAI_NAMES
from gateway.api.schemas.names import Kind, OtherTypes, ParameterTable, Row, for_kinds, ignored, refused
from gateway.api.schemas.unserved_names import OF_CLIENTS
from gateway.responses.body import InputItemBody, InputPartBody, ReasoningBody, ResponseBody, TextBody, TextFormatBody
from gateway.responses.items import read_hosted


class Responses(Kind):
    """An object in a body of this API."""

    RESPONSE = "POST /v1/responses"
    ITEM = "An item of the input of /v1/responses"
    PART = "A part of an item of /v1/responses"
    REASONING = "reasoning of /v1/responses"
    TEXT = "text of /v1/responses"
    TEXT_FORMAT = "text.format of /v1/responses"


_ITEM_TYPES = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "item_reference",
        "compaction",
        "compaction_trigger",
    }
)
_PART_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})
_ITEM = (Responses.ITEM,)
_PART = (Responses.PART,)
_BOTH = (*_ITEM, *_PART)
_CACHED = "Prompts are always cached."


def _ignored(name: str, note: str, example: object) -> Row:
    return ignored(name, note, example, Responses.RESPONSE)


def _refused(name: str, instead: str, example: object, without_effect: tuple[object, ...] = ()) -> Row:
    return refused(name, instead, example, without_effect, Responses.RESPONSE)


def _noted(name: str, note: str, example: object, kinds: tuple[Kind, ...] = _ITEM) -> Row:
    return ignored(name, note, example, *kinds)


_ROWS = (
    _ignored("prompt_cache_retention", "The cache keeps what is used, for as long as it has room.", "24h"),
    _ignored("prompt_cache_options", "The cache keeps what is used, for as long as it has room.", {"ttl": "30m"}),
    _ignored("service_tier", "There is one tier.", "auto"),
    _ignored("client_metadata", "Codex's notes about itself.", {"session": "a"}),
    _ignored("image", "Images are refused where they stand.", {"context_compression": "auto"}),
    _ignored("stream_options", "Streams are never padded, and always end with usage.", {"include_obfuscation": False}),
    _refused("truncation", "Shorten the conversation before it is too long.", "auto", ("disabled",)),
    _refused("conversation", "Use 'previous_response_id'.", "conv_1"),
    _refused(
        "context_management",
        "Compact the conversation at /v1/responses/compact, or with an item 'compaction_trigger'.",
        [{"type": "compaction"}],
        ([],),
    ),
    _refused("prompt", "Send the prompt itself as 'instructions' and 'input'.", {"id": "pmpt_1"}),
    _refused("moderation", "Leave it out.", {"model": "omni-moderation-latest"}),
    _refused("access_programs", "Leave it out.", {"cyber": "standard"}, ({},)),
    _refused("background_options", "Leave it out.", {"completion_window": "2h"}, ({},)),
    _refused("modalities", "This server writes text only.", ["audio"], (["text"],)),
    _refused("messages", "Name the list 'input'.", []),
    _refused("max_tokens", "Use 'max_output_tokens'.", 5),
    _refused("max_completion_tokens", "Use 'max_output_tokens'.", 5),
    _refused("response_format", "Use 'text.format'.", {"type": "json_object"}),
    _refused("reasoning_effort", "Use 'reasoning.effort'.", "low"),
    _refused("n", "Ask several times.", 2, (1,)),
    refused(
        "context",
        "Leave it out: the chat template says which reasoning of earlier turns the model sees.",
        "current_turn",
        ("auto",),
        Responses.REASONING,
    ),
    refused("mode", "Leave it out.", "pro", ("standard",), Responses.REASONING),
    _noted("phase", "Whether a message was the last of its turn; no template reads it.", "commentary"),
    _noted("end_turn", "Whether a message was the last of its turn; no template reads it.", True),
    _noted("caller", "Who called a function: always the model.", {"type": "direct"}),
    _noted("async", "Whether OpenAI's model waits for the result of a call.", False),
    _noted("created_by", "Names who made an item at OpenAI.", "someone"),
    _noted("internal_chat_message_metadata_passthrough", "Codex's notes about a turn, for OpenAI.", {"turn_id": "a"}),
    _noted("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}),
    _noted("provider_specific_fields", "LiteLLM's notes on an earlier item.", {"a": 1}),
    _noted("signature", "Proves to another provider that its model has thought so.", "a"),
    _noted("format", "The form of `signature`.", "a"),
    _noted("annotations", "Notes of an earlier answer about its sources.", [], _PART),
    _noted("logprobs", "Log probabilities of an earlier answer.", [], _PART),
    _noted("parsed", "OpenAI's SDK puts it beside the text that it was made of.", {"a": 1}, _PART),
    _noted("prompt_cache_breakpoint", _CACHED, {"mode": "explicit"}, _PART),
    _noted("cache_control", _CACHED, {"type": "ephemeral"}, _BOTH),
    _noted("index", "Items and parts stand in their order.", 0, _BOTH),
)

RESPONSE_NAMES = ParameterTable(
    {
        Responses.RESPONSE: ResponseBody,
        Responses.ITEM: InputItemBody,
        Responses.PART: InputPartBody,
        Responses.REASONING: ReasoningBody,
        Responses.TEXT: TextBody,
        Responses.TEXT_FORMAT: TextFormatBody,
    },
    (*_ROWS, *for_kinds(OF_CLIENTS, Responses.RESPONSE)),
    {Responses.ITEM: OtherTypes(_ITEM_TYPES, read_hosted), Responses.PART: OtherTypes(_PART_TYPES)},
    beside=OPENAI_NAMES,
)
