"""What becomes of the parameters of `POST /v1/responses`. The served ones are fields of `gateway.responses.body`."""

from __future__ import annotations

from functools import partial

from gateway.api.schemas.described import rows_of
from gateway.api.schemas.row import Kind, Row, Use, ignored, refused
from gateway.api.schemas.sampling_fields import SamplingFields

_RESPONSE = (Kind.RESPONSE,)
_REASONING = (Kind.RESPONSE_REASONING,)
_TEXT = (Kind.RESPONSE_TEXT,)
_FORMAT = (Kind.TEXT_FORMAT,)


def _served(name: str, note: str, example: object = None, holds: Kind | None = None) -> Row:
    return Row(name, _RESPONSE, note, example, holds=holds)


_ignored, _refused = partial(ignored, kinds=_RESPONSE), partial(refused, kinds=_RESPONSE)

RESPONSE_NAMES = (
    *rows_of(SamplingFields, Kind.RESPONSE),
    _served("model", "The model to use."),
    _served(
        "input",
        "A text, or a list of items: messages, calls of functions and their results, reasoning.",
        holds=Kind.RESPONSE_ITEM,
    ),
    _served("instructions", "A system message before the conversation; not kept for the next response.", "Be brief."),
    _served("previous_response_id", "Go on with the conversation of a stored response."),
    _served("store", "Keep the response for a week, so that it can be read and continued; true if left out.", False),
    _served("background", "Answer at once, and compute the response as a job of the batch lane.", True),
    _served("stream", "Send the response as typed server-sent events.", True),
    _served("include", "More output: log probabilities, reasoning to give back.", ["reasoning.encrypted_content"]),
    _served("metadata", "Up to 16 texts that the response repeats.", {"task": "a"}),
    _served("tools", "Functions that the model may call.", [{"type": "function", "name": "f"}]),
    _served("tool_choice", "Whether functions are called: `auto`, `none`, `required`, or which.", "none"),
    _served("parallel_tool_calls", "Allow several calls in one response.", False),
    _served("text", "The format of the text.", {"format": {"type": "json_object"}}, Kind.RESPONSE_TEXT),
    _served(
        "reasoning", "How much the model thinks, and where that is told.", {"effort": "low"}, Kind.RESPONSE_REASONING
    ),
    _served("enable_thinking", "Think, or do not, where the template knows it.", False),
    _served("thinking", "Another form of `enable_thinking`.", {"type": "disabled"}, Kind.CHAT_THINKING),
    _served("chat_template_kwargs", "Variables of the template.", {"enable_thinking": False}),
    _served("max_output_tokens", "Tokens to generate at most, reasoning included.", 3),
    _served("top_logprobs", "Report the log probability of each token, and of so many likely alternatives.", 2),
    _served("logprob_token_ids", "Report these tokens instead of the likeliest ones; with log probabilities."),
    _served("user", "The end user; a name is repeated in the response, an object is not.", "someone"),
    _served("safety_identifier", "Repeated in the response.", "someone"),
    _served("prompt_cache_key", "Repeated in the response. Prompts are cached by their content.", "a"),
    _served("max_tool_calls", "Repeated in the response. It limits built-in tools, of which there are none.", 3),
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
    Row("effort", _REASONING, "How much the model thinks, as its chat template understands it.", "low"),
    Row("enabled", _REASONING, "Think, or do not.", False),
    Row(
        "summary",
        _REASONING,
        "`auto`, `concise` or `detailed`: reasoning stands in `summary` instead of `content`, whole and not shortened.",
        "auto",
    ),
    Row("generate_summary", _REASONING, "An older name of `summary`.", "auto"),
    Row(
        "context",
        _REASONING,
        "Leave it out: the chat template says which reasoning of earlier turns the model sees.",
        "current_turn",
        ("auto",),
        use=Use.REFUSED,
    ),
    Row("mode", _REASONING, "Leave it out.", "pro", ("standard",), use=Use.REFUSED),
    Row("format", _TEXT, "The form of the text.", {"type": "json_object"}, holds=Kind.TEXT_FORMAT),
    Row("verbosity", _TEXT, "How long answers are, where the chat template knows it.", "low"),
    Row("type", _FORMAT, "`text`, `json_object` or `json_schema`."),
    Row("name", _FORMAT, "Repeated in the response.", "answer"),
    Row("description", _FORMAT, "Repeated in the response.", "An answer."),
    Row("schema", _FORMAT, "The schema, with `json_schema`.", {"type": "object", "maxProperties": 0}),
    Row("strict", _FORMAT, "Refuse a schema that can be kept to in part only.", True),
)
