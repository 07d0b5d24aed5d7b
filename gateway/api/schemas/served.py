"""The parameters that are served. Each is a field of the body's struct in this folder."""

from __future__ import annotations

from gateway.api.schemas.row import GENERATION, Kind, Row

_CHAT = (Kind.CHAT,)
_COMPLETION = (Kind.COMPLETION,)
_TOKENIZE = (Kind.TOKENIZE,)

_FUNCTION = {"name": "f"}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

_TOOLS = (
    Row("tools", (Kind.CHAT, Kind.TOKENIZE), "Functions that the answer may call.", [_TOOL], holds=Kind.TOOL),
    Row("tool_choice", _CHAT, "`none`, `auto`, `required`, one function, or the allowed ones: what may be called."),
    Row("parallel_tool_calls", _CHAT, "False: at most one call an answer."),
    Row("functions", _CHAT, "The older form of `tools`.", [_FUNCTION], holds=Kind.FUNCTION),
    Row("function_call", _CHAT, "The older form of `tool_choice`: `none`, `auto`, or one function."),
    Row("type", (Kind.TOOL,), "Always `function`."),
    Row("function", (Kind.TOOL,), "The function.", holds=Kind.FUNCTION),
    Row("name", (Kind.FUNCTION,), "At most 64 letters, digits, `_` and `-`."),
    Row("description", (Kind.FUNCTION,), "What it does, for the model.", "Adds."),
    Row("parameters", (Kind.FUNCTION,), "JSON schema of the object of its arguments.", {"type": "object"}),
    Row("strict", (Kind.FUNCTION,), "The arguments keep to the schema.", True),
    Row("tool_calls", (Kind.MESSAGE,), "The calls of an earlier answer.", [_CALL], holds=Kind.TOOL_CALL),
    Row("tool_call_id", (Kind.MESSAGE,), "The call whose result the message is.", "call_1"),
    Row(
        "function_call",
        (Kind.MESSAGE,),
        "The older form of `tool_calls`.",
        {"name": "f", "arguments": "{}"},
        holds=Kind.CALLED_FUNCTION,
    ),
    Row("id", (Kind.TOOL_CALL,), "Names the call.", "call_2"),
    Row("type", (Kind.TOOL_CALL,), "Always `function`."),
    Row("function", (Kind.TOOL_CALL,), "What was called.", holds=Kind.CALLED_FUNCTION),
    Row("name", (Kind.CALLED_FUNCTION,), "The function's name.", "g"),
    Row("arguments", (Kind.CALLED_FUNCTION,), "JSON text of the arguments.", '{"a":1}'),
    Row("reasoning_content", (Kind.MESSAGE,), "What the model thought before an earlier answer.", "hm"),
    Row("reasoning", (Kind.MESSAGE,), "Another name of `reasoning_content`.", "hm"),
    Row("refusal", (Kind.MESSAGE,), "Text of an earlier answer that declined.", "no"),
    Row("refusal", (Kind.CONTENT_PART,), "The text of a part of the type `refusal`."),
    Row("thinking", (Kind.CONTENT_PART,), "The text of a part of the type `thinking`, or a list of parts."),
)

_CHAT_AND_TOKENIZE = (Kind.CHAT, Kind.TOKENIZE)
_TEMPLATE = (
    Row("reasoning_effort", _CHAT, "How much to think: `none` to `max`, where the template knows it.", "high"),
    Row("include_reasoning", _CHAT, "False: leave the reasoning out of the answer.", False),
    Row("chat_template", _CHAT_AND_TOKENIZE, "A template to use; only where the operator allows it.", "x"),
    Row("chat_template_kwargs", _CHAT_AND_TOKENIZE, "Variables of the template.", {"enable_thinking": False}),
    Row("documents", _CHAT, "Documents for templates that know them.", [{"text": "a"}]),
    Row("add_generation_prompt", _CHAT_AND_TOKENIZE, "Open the assistant's turn at the end.", False),
    Row("continue_final_message", _CHAT_AND_TOKENIZE, "The answer goes on after the last message."),
)

SERVED = (
    Row("model", (*GENERATION, Kind.TOKENIZE, Kind.DETOKENIZE), "The model to use."),
    Row("messages", (Kind.CHAT, Kind.TOKENIZE), "The conversation.", holds=Kind.MESSAGE),
    Row("prompt", _COMPLETION, "A text, a list of texts, a list of token ids, or a list of such lists."),
    Row("prompt", _TOKENIZE, "The text to turn into tokens; `messages` is the other choice."),
    Row("max_tokens", GENERATION, "Tokens to generate at most.", 3),
    Row("max_completion_tokens", _CHAT, "The newer name of `max_tokens`, and stronger.", 3),
    Row("temperature", GENERATION, "0 takes the most likely token each time.", 0.5),
    Row("top_p", GENERATION, "Draw from the most likely tokens that have this probability together.", 0.9),
    Row("top_k", GENERATION, "Draw from so many most likely tokens; 0 and -1 keep all.", 40),
    Row("min_p", GENERATION, "Drop tokens less likely than this times the most likely one.", 0.1),
    Row("n", GENERATION, "Answers to the same prompt.", 2),
    Row("stop", GENERATION, "A text, or a list of texts, before which the answer ends.", ["END"]),
    Row("stop_token_ids", GENERATION, "Tokens that end the answer.", [7]),
    Row("seed", GENERATION, "The same seed and request give the same answer.", 42),
    Row("presence_penalty", GENERATION, "Subtracted from the logit of each token that the answer has.", 0.5),
    Row("frequency_penalty", GENERATION, "The same, times the number of its occurrences.", 0.5),
    Row("repetition_penalty", GENERATION, "Divides positive logits of tokens in prompt and answer.", 1.1),
    Row("logit_bias", GENERATION, "Token id to what is added to its logit.", {"5": -100}),
    Row("ignore_eos", GENERATION, "Go on after the end-of-sequence token.", True),
    Row("stream", GENERATION, "Send the answer as server-sent events.", True),
    Row(
        "stream_options",
        GENERATION,
        "What a stream reports besides text; only with `stream`.",
        holds=Kind.STREAM_OPTIONS,
    ),
    Row("user", GENERATION, "The end user, checked and without influence.", "someone"),
    Row("priority", GENERATION, "Larger runs earlier among the requests that wait.", 5),
    Row("timeout", GENERATION, "Seconds until the answer must be complete.", 60.0),
    Row("logprobs", _CHAT, "Report the log probability of each token.", True),
    Row("top_logprobs", _CHAT, "Report so many likely alternatives too; only with `logprobs`."),
    Row("logprobs", _COMPLETION, "Report log probabilities with so many alternatives.", 2),
    Row("echo", _COMPLETION, "Begin the answer with the prompt.", True),
    Row(
        "prediction",
        _CHAT,
        "What the answer is expected to resemble; makes it faster, never different.",
        {"type": "content", "content": "abc"},
        holds=Kind.PREDICTION,
    ),
    Row(
        "response_format",
        GENERATION,
        "The answer is JSON, or matches a schema.",
        {"type": "json_object"},
        holds=Kind.RESPONSE_FORMAT,
    ),
    Row(
        "structured_outputs",
        GENERATION,
        "The same in the form of vLLM, and regular expressions, choices and grammars.",
        {"json_object": True},
        holds=Kind.STRUCTURED_OUTPUTS,
    ),
    Row("guided_json", GENERATION, "A JSON schema that the answer matches.", {"type": "object"}),
    Row("guided_regex", GENERATION, "A regular expression that the answer matches.", "a+"),
    Row("guided_choice", GENERATION, "Texts, one of which is the answer.", ["yes", "no"]),
    Row("guided_grammar", GENERATION, "A grammar in GBNF or Lark that the answer matches.", 'root ::= "a"'),
    Row("json_schema", GENERATION, "A JSON schema that the answer matches.", {"type": "object"}),
    Row("grammar", GENERATION, "A grammar in GBNF or Lark that the answer matches; empty for none.", 'root ::= "a"'),
    Row("type", (Kind.RESPONSE_FORMAT,), "`text`, `json_object` or `json_schema`."),
    Row("json_schema", (Kind.RESPONSE_FORMAT,), "The schema, with `json_schema`.", holds=Kind.JSON_SCHEMA),
    Row("schema", (Kind.RESPONSE_FORMAT,), "A schema beside `json_object`.", {"type": "object", "maxProperties": 0}),
    Row("name", (Kind.JSON_SCHEMA,), "A name for the reader, without influence.", "thing"),
    Row("description", (Kind.JSON_SCHEMA,), "A note for the reader, without influence.", "A thing."),
    Row("schema", (Kind.JSON_SCHEMA,), "The JSON schema that the answer matches.", {"type": "array"}),
    Row("strict", (Kind.JSON_SCHEMA,), "Refuse a `oneOf` whose alternatives may overlap, instead of `anyOf`.", True),
    Row("json", (Kind.STRUCTURED_OUTPUTS,), "A JSON schema that the answer matches.", {"type": "object"}),
    Row("regex", (Kind.STRUCTURED_OUTPUTS,), "A regular expression that the answer matches.", "a+"),
    Row("choice", (Kind.STRUCTURED_OUTPUTS,), "Texts, one of which is the answer.", ["yes", "no"]),
    Row("grammar", (Kind.STRUCTURED_OUTPUTS,), "A grammar in GBNF or Lark that the answer matches.", 'root ::= "a"'),
    Row("json_object", (Kind.STRUCTURED_OUTPUTS,), "The answer is a JSON object.", True),
    Row("include_usage", (Kind.STREAM_OPTIONS,), "End the stream with a chunk that counts tokens.", True),
    Row("role", (Kind.MESSAGE,), "system, developer, user, assistant, tool or function."),
    Row("content", (Kind.MESSAGE,), "A text, or a list of parts.", holds=Kind.CONTENT_PART),
    Row("name", (Kind.MESSAGE,), "Who speaks.", "Ann"),
    Row(
        "type",
        (Kind.CONTENT_PART,),
        "The form of the part: `text`, `input_text`, `output_text`, `refusal` or `thinking`.",
    ),
    Row("text", (Kind.CONTENT_PART,), "The text of the part."),
    Row("type", (Kind.PREDICTION,), "Always `content`."),
    Row("content", (Kind.PREDICTION,), "A text, or a list of parts.", holds=Kind.CONTENT_PART),
    Row("add_special_tokens", _TOKENIZE, "Add the tokens that begin every prompt, as for completions.", True),
    Row("tokens", (Kind.DETOKENIZE,), "The token ids to turn into text."),
    *_TOOLS,
    *_TEMPLATE,
)
