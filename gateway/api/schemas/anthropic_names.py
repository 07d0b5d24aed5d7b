"""The names in the bodies of Anthropic's Messages API, whose structs stand in `gateway/anthropic/body.py`."""

from __future__ import annotations

from functools import partial

from gateway.api.schemas.row import Kind, Row, Use, ignored, refused

BLOCK_TYPES = frozenset(
    {"text", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"}
)

_MESSAGES = (Kind.ANTHROPIC_MESSAGES,)
_COUNT = (Kind.COUNT_TOKENS,)
_BOTH = (*_MESSAGES, *_COUNT)
_TURN = (Kind.TURN,)
_BLOCK = (Kind.BLOCK,)
_SOURCE = (Kind.SOURCE,)
_OUTPUT = (Kind.OUTPUT_CONFIG,)
_THINKING = (Kind.THINKING,)
_TOOL = {"name": "f", "input_schema": {"type": "object"}}
_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


_refused = partial(refused, kinds=_BOTH)

ANTHROPIC_NAMES = (
    Row("model", _BOTH, "The model to use."),
    Row(
        "messages",
        _BOTH,
        "The conversation. A last turn of the assistant is the beginning of the answer.",
        holds=Kind.TURN,
    ),
    Row(
        "system",
        _BOTH,
        "What goes before the conversation: a text, or a list of blocks.",
        "Be brief.",
        holds=Kind.BLOCK,
    ),
    Row("tools", _BOTH, "Tools that the model may use.", [_TOOL]),
    Row("tool_choice", _BOTH, "Whether a tool has to be used; only with `tools`."),
    Row(
        "thinking",
        _BOTH,
        "Whether the model thinks first, where its template can say so.",
        {"type": "disabled"},
        holds=Kind.THINKING,
    ),
    Row("type", _THINKING, "`enabled`, `disabled`, or `adaptive`, which leaves it to the template."),
    Row("budget_tokens", _THINKING, "Checked, and otherwise the model's own affair."),
    Row("display", _THINKING, "`omitted` leaves the thinking out of the answer.", "omitted"),
    ignored("block_binding", "Thinking is taken as it is.", {"prefix_mismatch_behavior": "drop_block"}, _THINKING),
    Row("chat_template_kwargs", _BOTH, "Variables of the template.", {"enable_thinking": False}),
    Row("max_tokens", _MESSAGES, "Tokens to generate at most."),
    Row("temperature", _MESSAGES, "0 takes the most likely token each time.", 0.5),
    Row("top_p", _MESSAGES, "Draw from the most likely tokens that have this probability together.", 0.9),
    Row("top_k", _MESSAGES, "Draw from so many most likely tokens.", 40),
    Row("stop_sequences", _MESSAGES, "Texts before which the answer ends.", ["END"]),
    Row("stream", _MESSAGES, "Send the answer as server-sent events.", True),
    Row(
        "output_config",
        _MESSAGES,
        "What is asked of the answer as a whole.",
        {"format": _FORMAT},
        holds=Kind.OUTPUT_CONFIG,
    ),
    Row("format", _OUTPUT, "A JSON schema of the text.", _FORMAT),
    Row("effort", _OUTPUT, "How much the model thinks, where its template can say so.", "low"),
    Row(
        "task_budget",
        _OUTPUT,
        "No model here has learned to count it down. Use 'max_tokens', and end the loop at the client.",
        {"type": "tokens", "total": 20000},
        use=Use.REFUSED,
    ),
    Row("output_format", _MESSAGES, "The same as `format` in `output_config`.", _FORMAT),
    ignored("metadata", "Names the end user to Anthropic.", {"user_id": "someone"}, _BOTH),
    ignored("service_tier", "There is one tier.", "auto", _BOTH),
    ignored("speed", "There is one speed.", "standard", _BOTH),
    ignored("diagnostics", "They tell why Anthropic's cache missed.", {"previous_message_id": None}, _BOTH),
    ignored("billing_policy", "Nobody is billed here.", {"type": "billing_policy"}, _BOTH),
    ignored("fallback_credit_token", "Nobody is billed here.", "abc", _BOTH),
    ignored("inference_geo", "The queue chooses the worker.", "us", _BOTH),
    ignored("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (*_BOTH, *_BLOCK)),
    *(
        ignored(name, "It does not change the prompt.", example, _COUNT)
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
    _refused("clear_at", "Leave the message out of the next request.", "next_user_message", kinds=_TURN),
    _refused("output_config", "Write it into the body itself.", {"effort": "low"}, kinds=_TURN),
    Row("role", _TURN, "user or assistant, or system for what is said amid the conversation."),
    Row("content", _TURN, "A text, or a list of blocks.", holds=Kind.BLOCK),
    Row(
        "type",
        _BLOCK,
        "text, document, search_result, thinking, redacted_thinking, tool_use or tool_result; in a turn of the "
        "assistant also what Anthropic's server ran: server_tool_use, mcp_tool_use, and their results.",
    ),
    Row("text", _BLOCK, "The text of a text block."),
    Row("thinking", _BLOCK, "What the assistant thought."),
    Row("id", _BLOCK, "The id of a tool's use."),
    Row("name", _BLOCK, "The name of the tool that is used."),
    Row("input", _BLOCK, "The arguments of the tool's use."),
    Row("tool_use_id", _BLOCK, "The use of a tool whose result this is."),
    Row("content", _BLOCK, "The result of a tool or a search: a text, or a list of blocks.", holds=Kind.BLOCK),
    Row("is_error", _BLOCK, "The tool failed: the model is told `Error: ` before the result."),
    Row(
        "source",
        _BLOCK,
        "Where a document stands: `{type: text, media_type: text/plain, data: ...}` or `{type: content, content: "
        "...}`. Of a result of a search: where that was found, a text.",
        holds=Kind.SOURCE,
    ),
    Row("type", _SOURCE, "`text`, or `content`."),
    Row("media_type", _SOURCE, "Of a text: `text/plain`."),
    Row("data", _SOURCE, "The text."),
    Row("content", _SOURCE, "A text, or a list of blocks of text.", holds=Kind.BLOCK),
    Row("url", _SOURCE, "Nothing is fetched: a block that has it is refused by the type of its source."),
    Row("file_id", _SOURCE, "No files are kept: a block that has it is refused by the type of its source."),
    Row("title", _BLOCK, "The title of a document or of a result of a search, put before its text."),
    Row("context", _BLOCK, "What a document is about, put before its text."),
    ignored("citations", "No answer cites.", {"enabled": False}, _BLOCK),
    ignored("signature", "Proves to Anthropic that thinking is its own; thinking is taken as it is.", "abc", _BLOCK),
    ignored("data", "Thinking that only Anthropic can read.", "abc", _BLOCK),
    ignored("caller", "Who used a tool: always the model.", {"type": "direct"}, _BLOCK),
    ignored("toolset_name", "Of which of Anthropic's sets the tool is.", "browser", _BLOCK),
)
