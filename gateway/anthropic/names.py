"""The names in the bodies of Anthropic's Messages API: what is served, and what becomes of the others."""

from __future__ import annotations

from gateway.anthropic.block_fields import read_hosted_block
from gateway.anthropic.body import (
    BlockBody,
    CountTokensBody,
    MessageBody,
    MessagesBody,
    OutputBody,
    SourceBody,
    ThinkingBody,
)
from gateway.api.schemas.names import Kind, OtherTypes, ParameterTable, Row, ignored, refused
from gateway.api.schemas.openai_names import OPENAI_NAMES


class Anthropic(Kind):
    """An object in a body of this API."""

    MESSAGES = "POST /v1/messages"
    COUNT_TOKENS = "POST /v1/messages/count_tokens"
    TURN = "A message of /v1/messages"
    BLOCK = "A block of a message of /v1/messages"
    SOURCE = "The source of a block of /v1/messages"
    OUTPUT_CONFIG = "output_config of /v1/messages"
    THINKING = "thinking of /v1/messages"


_BLOCK_TYPES = frozenset(
    {"text", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"}
)
_BOTH = (Anthropic.MESSAGES, Anthropic.COUNT_TOKENS)
_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def _refused(
    name: str, instead: str, example: object, without_effect: tuple[object, ...] = (), kinds: tuple[Kind, ...] = _BOTH
) -> Row:
    return refused(name, instead, example, without_effect, *kinds)


_ROWS = (
    ignored(
        "block_binding", "Thinking is taken as it is.", {"prefix_mismatch_behavior": "drop_block"}, Anthropic.THINKING
    ),
    _refused(
        "task_budget",
        "No model here has learned to count it down. Use 'max_tokens', and end the loop at the client.",
        {"type": "tokens", "total": 20000},
        kinds=(Anthropic.OUTPUT_CONFIG,),
    ),
    ignored("metadata", "Names the end user to Anthropic.", {"user_id": "someone"}, *_BOTH),
    ignored("service_tier", "There is one tier.", "auto", *_BOTH),
    ignored("speed", "There is one speed.", "standard", *_BOTH),
    ignored("diagnostics", "They tell why Anthropic's cache missed.", {"previous_message_id": None}, *_BOTH),
    ignored("billing_policy", "Nobody is billed here.", {"type": "billing_policy"}, *_BOTH),
    ignored("fallback_credit_token", "Nobody is billed here.", "abc", *_BOTH),
    ignored("inference_geo", "The queue chooses the worker.", "us", *_BOTH),
    ignored("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, *_BOTH, Anthropic.BLOCK),
    *(
        ignored(name, "It does not change the prompt.", example, Anthropic.COUNT_TOKENS)
        for name, example in (
            ("max_tokens", 10),
            ("temperature", 0.5),
            ("top_p", 0.9),
            ("top_k", 40),
            ("stop_sequences", ["END"]),
            ("stream", True),
            ("output_config", {"effort": "low"}),
            ("output_format", _FORMAT),
        )
    ),
    _refused("container", "Tools run at the client.", "c_1"),
    _refused("mcp_servers", "Ask the servers at the client, and send their tools in 'tools'.", [{"type": "url"}]),
    _refused(
        "context_management",
        "Shorten the conversation at the client.",
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        # Claude Code sends the second with every request.
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    _refused("compaction", "Shorten the conversation at the client.", {"type": "compaction"}),
    _refused("fallbacks", "Name one model.", [{"model": "other"}], ([],)),
    _refused("thread", "Send the whole conversation.", {"type": "create"}),
    _refused("clear_at", "Leave the message out of the next request.", "next_user_message", kinds=(Anthropic.TURN,)),
    _refused("output_config", "Write it into the body itself.", {"effort": "low"}, kinds=(Anthropic.TURN,)),
    ignored("citations", "No answer cites.", {"enabled": False}, Anthropic.BLOCK),
    ignored(
        "signature", "Proves to Anthropic that thinking is its own; thinking is taken as it is.", "abc", Anthropic.BLOCK
    ),
    ignored("data", "Thinking that only Anthropic can read.", "abc", Anthropic.BLOCK),
    ignored("caller", "Who used a tool: always the model.", {"type": "direct"}, Anthropic.BLOCK),
    ignored("toolset_name", "Of which of Anthropic's sets the tool is.", "browser", Anthropic.BLOCK),
)

ANTHROPIC_NAMES = ParameterTable(
    {
        Anthropic.MESSAGES: MessagesBody,
        Anthropic.COUNT_TOKENS: CountTokensBody,
        Anthropic.TURN: MessageBody,
        Anthropic.BLOCK: BlockBody,
        Anthropic.SOURCE: SourceBody,
        Anthropic.OUTPUT_CONFIG: OutputBody,
        Anthropic.THINKING: ThinkingBody,
    },
    _ROWS,
    {Anthropic.BLOCK: OtherTypes(_BLOCK_TYPES, read_hosted_block)},
    beside=OPENAI_NAMES,
)
