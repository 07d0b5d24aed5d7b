"""Names that official SDKs, agents and users of vLLM send and that are not served: why, or what to do instead.

Any other unknown name is a 400 that names it and the nearest served one.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.api.schemas.names import Kind, Row, ignored, refused


class OpenAi(Kind):
    """An object in a body of chat completions, text completions, or the tokenizer's endpoints."""

    CHAT = "POST /v1/chat/completions"
    COMPLETION = "POST /v1/completions"
    TOKENIZE = "POST /tokenize"
    DETOKENIZE = "POST /detokenize"
    STREAM_OPTIONS = "stream_options"
    AGENT_HINTS = "agent_hints"
    MESSAGE = "A message"
    CONTENT_PART = "A part of a message's content"
    IMAGE_URL = "image_url of a part"
    PREDICTION = "prediction"
    CHAT_THINKING = "thinking of /v1/chat/completions and /v1/responses"
    CHAT_REASONING = "reasoning of /v1/chat/completions"
    RESPONSE_FORMAT = "response_format"
    JSON_SCHEMA = "response_format.json_schema"
    STRUCTURED_OUTPUTS = "structured_outputs"
    TOOL = "A tool"
    FUNCTION = "A function that may be called"
    TOOL_CALL = "A call in a message"
    CALLED_FUNCTION = "The function of a call in a message"
    CALLED_CUSTOM = "The custom tool of a call in a message"


_GENERATION: tuple[Kind, ...] = (OpenAi.CHAT, OpenAi.COMPLETION)
_CHAT, _MESSAGE, _PART, _TOOL = (OpenAi.CHAT,), (OpenAi.MESSAGE,), (OpenAi.CONTENT_PART,), (OpenAi.TOOL,)
_STRUCTURED = (OpenAi.STRUCTURED_OUTPUTS,)
_TEXT_ONLY = "Send text; this server reads nothing else, except images as parts `image_url`."
_AS_IMAGE_URL = (
    "Send an image as {type: image_url, image_url: {url: ...}}, with a data URL or an https URL, or {file_id: ...}."
)
_THINKING = "Use 'reasoning_effort', or the variables of the model's template in 'chat_template_kwargs'."
_CACHED = "Prompts are always cached."

# By the object they stand in and the advice: names, each with an example and the values that pass as left out.
_REFUSED: Mapping[tuple[Kind, ...], Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    _GENERATION: {
        "Use 'n' and a 'temperature': beam search is not served.": {
            "use_beam_search": (True, False),
            "length_penalty": (2.0, 1, 1.0),
            "early_stopping": (True, False),
        },
        "Leave it out.": {"spaces_between_special_tokens": (False, True)},
        "Leave it out: prompts keep their last tokens.": {"truncation_side": ("right", "left")},
        "Send a message with the role `system`.": {"system": ("Be brief.",)},
        "Write the parameters into the body itself.": {"options": ({"num_predict": 5}, {})},
        "Workers share no memory.": {"kv_transfer_params": ({"a": 1}, {})},
    },
    _CHAT: {
        _TEXT_ONLY: {"audio": ({"voice": "a"},), "modalities": (["audio"], ["text"])},
        "Leave it out: the model's files say how images are prepared; `detail: low` of an image makes fewer tokens.": {
            "mm_processor_kwargs": ({"max_pixels": 100}, {})
        },
        "Put the found text into a message.": {
            "web_search_options": ({"a": 1},),
            "web_search": (True, False),
            "files": ([{"id": "a"}], []),
        },
        "A chat template writes the special tokens itself.": {"add_special_tokens": (True, False)},
        # `deepseek` is served: reasoning stands in a field of its own.
        "Use 'include_reasoning'.": {
            "reasoning_format": ("none", "auto", "deepseek"),
        },
        _THINKING: {"thinking_token_budget": (100,)},
        "Offer the tools themselves with 'tools'.": {"tool_ids": (["a"], []), "skill_ids": (["a"], [])},
        "Leave it out.": {"moderation": ({"model": "omni-moderation-latest"},)},
        "Write the parameters into the body.": {"params": ({"temperature": 0.5}, {})},
        "Name the list 'messages'; 'input' belongs to /v1/responses and /v1/embeddings.": {"input": ("x",)},
        "Send a message with the role `system`; it belongs to /v1/responses.": {"instructions": ("x",)},
    },
    _MESSAGE: {
        "The sound lies at OpenAI: send its transcript as 'content'.": {"audio": ({"id": "audio_1"},)},
        "Use 'continue_final_message' with 'add_generation_prompt: false'.": {
            "prefix": (True, False),
            "partial": (True, False),
        },
        _TEXT_ONLY: {"images": (["AAAA"], [])},
    },
    _PART: {
        _TEXT_ONLY: {
            "input_audio": ({"data": ""},),
            "file": ({"file_id": "a"},),
            "video_url": ({"url": "https://example.com/a.mp4"},),
        },
        _AS_IMAGE_URL: {
            "source": ({"type": "base64", "data": ""},),
            "image_file": ({"file_id": "a"},),
            "image_embeds": ("AAAA",),
            "input_image": ({"data": ""},),
            "file_id": ("file-1",),
            "image": ("AAAA",),
        },
    },
    _TOOL: {
        "Describe it as a function: `type: function`.": {"custom": ({"name": "f"},)},
        "Put it into `function`, beside which only `type` stands.": {
            "name": ("f",),
            "description": ("Adds.",),
            "parameters": ({},),
            "strict": (True,),
        },
    },
    (OpenAi.CHAT_THINKING,): {_THINKING: {"budget_tokens": (100,)}},
    (OpenAi.CHAT_REASONING,): {_THINKING: {"max_tokens": (100,)}},
    (OpenAi.TOKENIZE,): {"Leave it out.": {"return_token_strs": (True, False)}},
    _STRUCTURED: {
        "Offer the tools with 'tools'.": {"structural_tag": ("{}",)},
        "One space, or a new line with its indentation, separates the parts of JSON. For others use 'grammar'.": {
            "disable_any_whitespace": (True, False),
            "whitespace_pattern": ("[ ]?",),
        },
        "Write 'additionalProperties: false' into the schema.": {"disable_additional_properties": (True, False)},
    },
}

# By the object they stand in and the reason: names, each with an example.
_IGNORED: Mapping[tuple[Kind, ...], Mapping[str, Mapping[str, object]]] = {
    _GENERATION: {
        "Answers of this endpoint are not kept for later.": {"store": True, "metadata": {"task": "a"}},
        "There is one tier. The lane of a request is chosen by how it is sent.": {"service_tier": "auto"},
        "Names the end user to OpenAI.": {"safety_identifier": "someone"},
        "Prompts are cached by their content; `prompt_cache_retention` and `agent_hints` say for how long.": {
            "prompt_cache_options": {"ttl": "30m"},
        },
        "Models stay loaded.": {"keep_alive": "5m"},
        "Send the header `x-request-id`: it names the request everywhere.": {"request_id": "mine"},
        "There is one implementation of structured output.": {"guided_decoding_backend": "auto"},
        "There is one provider.": {"provider": {"order": ["a"]}},
        "Whole answers always count tokens; `stream_options` asks a stream to.": {"usage": {"include": True}},
    },
    _CHAT: {"Names the answer in the client.": {"id": "a"}},
    (OpenAi.COMPLETION,): {
        "A completion has no images.": {"mm_processor_kwargs": {"fps": 1}},
        "A completion has no chat template that could think.": {
            "chat_template_kwargs": {"enable_thinking": False},
            "enable_thinking": False,
            "thinking": {"type": "disabled"},
            "think": False,
            "reasoning": {"enabled": False},
            "reasoning_effort": "low",
        },
    },
    (OpenAi.CHAT_REASONING,): {"Reasoning is returned in full.": {"summary": "auto"}},
    (OpenAi.STREAM_OPTIONS,): {"Streams are never padded.": {"include_obfuscation": False}},
    _STRUCTURED: {"There is one implementation.": {"disable_fallback": True}},
    _MESSAGE: {
        "A note on an earlier answer; no template reads it.": {
            "annotations": [],
            "id": "msg_1",
            "provider_specific_fields": {"a": 1},
            "status": "completed",
            "weight": 1,
        },
        "The text stands in `reasoning` or `reasoning_content` too.": {"reasoning_details": [], "thinking_blocks": []},
        "OpenAI's SDK puts it beside the content that it was made of.": {"parsed": {"a": 1}},
        "Messages are all of this type.": {"type": "message"},
        "When the message was written.": {"timestamp": 1, "created_at": 1},
    },
    (*_MESSAGE, OpenAi.TOOL_CALL): {"Another provider's notes.": {"extra_content": {"google": {}}}},
    _PART: {
        "Proves to Anthropic that its model has thought so.": {"signature": "a"},
        "Whether the thought was complete.": {"closed": True},
        "Notes of an earlier answer about its sources.": {"annotations": []},
        _CACHED: {"prompt_cache_breakpoint": {"mode": "explicit"}},
        "Images are known by their content.": {"uuid": "a"},
        "OpenAI's agents for Node repeat the fields of a message in the part with its text.": {
            "role": "assistant",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [],
        },
    },
    (OpenAi.TOOL_CALL,): {
        "Calls stand in their order.": {"index": 0},
        "LiteLLM's notes.": {"provider_specific_fields": 1},
    },
    (OpenAi.CALLED_FUNCTION,): {"OpenAI's SDK puts them beside `arguments`.": {"parsed_arguments": {"a": 1}}},
    (*_TOOL, OpenAi.FUNCTION, *_MESSAGE, *_PART): {_CACHED: {"cache_control": {"type": "ephemeral"}}},
}

# By client and reason: names that clients send for themselves or their own servers.
_OF_CLIENTS: Mapping[str, Mapping[str, object]] = {
    "Names or describes a chat in Open WebUI, whose direct connections may pass it on.": {
        "chat_id": "a",
        "session_id": "a",
        "message_id": "a",
        "parent_id": "a",
        "folder_id": "a",
        "terminal_id": "a",
        "parent_message": {"id": "a"},
        "background_tasks": {"title_generation": True},
        "features": {"web_search": False},
        "variables": {"{{USER_NAME}}": "Ann"},
        "model_item": {"id": "a"},
        "filter_ids": [],
        "tool_servers": [],
    },
    "Names a conversation in LibreChat.": {"conversationId": "a", "conversation_id": "a", "thread_id": "a"},
    "Names a trace for OpenRouter or Langfuse.": {"trace": {"trace_id": "a"}, "trace_id": "a", "generation_name": "a"},
    "How Ollama loads a model; here that is the operator's choice.": {
        "num_ctx": 4096,
        "num_gpu": 1,
        "num_thread": 8,
        "num_batch": 512,
        "use_mmap": True,
        "use_mlock": False,
    },
}


def names_of_clients(*kinds: Kind) -> tuple[Row, ...]:
    """Return the rows of the names that clients send for themselves."""
    return tuple(
        ignored(name, note, each, *kinds) for note, names in _OF_CLIENTS.items() for name, each in names.items()
    )


UNSERVED = (
    *(
        refused(name, note, example, tuple(passing), *kinds)
        for kinds, notes in _REFUSED.items()
        for note, names in notes.items()
        for name, (example, *passing) in names.items()
    ),
    *(
        ignored(name, note, example, *kinds)
        for kinds, notes in _IGNORED.items()
        for note, names in notes.items()
        for name, example in names.items()
    ),
    *names_of_clients(*_GENERATION),
)
