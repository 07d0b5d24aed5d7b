"""What becomes of the names in the items of `POST /v1/responses`, and in their parts.

Clients send back what they were sent, by this server or by OpenAI's: what only says something about an item is
ignored. The served names are fields of `gateway.responses.body`, which says with `item_fields` what each type has.
"""

from __future__ import annotations

from gateway.api.schemas.row import Kind, Row, Use

ITEM_TYPES = frozenset(
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
PART_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})

_ITEM = (Kind.RESPONSE_ITEM,)
_PART = (Kind.RESPONSE_PART,)
_BOTH = (*_ITEM, *_PART)
_CACHED = "Prompts are always cached."


def _ignored(name: str, note: str, example: object, kinds: tuple[Kind, ...] = _ITEM) -> Row:
    return Row(name, kinds, note, example, use=Use.IGNORED)


ITEM_NAMES = (
    Row(
        "type",
        _ITEM,
        "`message` if left out, `function_call`, `function_call_output`, `reasoning`, `item_reference`, `compaction`; "
        "`compaction_trigger` as the last one asks for a summary of the conversation. Calls of OpenAI's own tools and "
        "their results (`mcp_call`, `shell_call`, `custom_tool_call`) are read as those of functions.",
    ),
    Row("id", _ITEM, "Its id; of an `item_reference`, which item is meant."),
    Row("status", _ITEM, "Repeated where the items of a response are listed."),
    Row("role", _ITEM, "Of a message: user, assistant, system or developer."),
    Row("content", _ITEM, "Of a message or of reasoning: a text, or a list of parts.", holds=Kind.RESPONSE_PART),
    Row("call_id", _ITEM, "Which call this is, or whose result."),
    Row("name", _ITEM, "The function that is called, or whose result this is."),
    Row("namespace", _ITEM, "The namespace of the function."),
    Row("arguments", _ITEM, "Of a call: JSON text."),
    Row("output", _ITEM, "Of a result: a text, or a list of parts.", holds=Kind.RESPONSE_PART),
    Row("summary", _ITEM, "Of reasoning: its text, where `content` has none.", holds=Kind.RESPONSE_PART),
    Row(
        "encrypted_content",
        _ITEM,
        "Of reasoning and of `compaction`: what this server has encrypted for the same tenant.",
    ),
    _ignored("phase", "Whether a message was the last of its turn; no template reads it.", "commentary"),
    _ignored("end_turn", "Whether a message was the last of its turn; no template reads it.", True),
    _ignored("caller", "Who called a function: always the model.", {"type": "direct"}),
    _ignored("async", "Whether OpenAI's model waits for the result of a call.", False),
    _ignored("created_by", "Names who made an item at OpenAI.", "someone"),
    _ignored("internal_chat_message_metadata_passthrough", "Codex's notes about a turn, for OpenAI.", {"turn_id": "a"}),
    _ignored("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}),
    _ignored("provider_specific_fields", "LiteLLM's notes on an earlier item.", {"a": 1}),
    _ignored("signature", "Proves to another provider that its model has thought so.", "a"),
    _ignored("format", "The form of `signature`.", "a"),
    Row("type", _PART, "`input_text`, `output_text`, `text`, `summary_text`, `reasoning_text` or `refusal`."),
    Row("text", _PART, "Its text."),
    Row("refusal", _PART, "Why the model has refused."),
    _ignored("annotations", "Notes of an earlier answer about its sources.", [], _PART),
    _ignored("logprobs", "Log probabilities of an earlier answer.", [], _PART),
    _ignored("parsed", "OpenAI's SDK puts it beside the text that it was made of.", {"a": 1}, _PART),
    _ignored("prompt_cache_breakpoint", _CACHED, {"mode": "explicit"}, _PART),
    _ignored("cache_control", _CACHED, {"type": "ephemeral"}, _BOTH),
    _ignored("index", "Items and parts stand in their order.", 0, _BOTH),
)
