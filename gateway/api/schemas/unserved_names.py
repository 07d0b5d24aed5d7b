"""Names of OpenAI, vLLM and other servers that are not served: why they change nothing, or what to do instead.

A name that only adjusts another one (the threshold of a sampler that is off) changes nothing while that one is refused.
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
        "Use 'max_tokens'.": {"max_new_tokens": (5,), "num_predict": (5,), "max_length": (5,)},
        "Use 'min_p', 'top_p' or 'top_k'.": {
            "typical_p": (0.9, 1, 1.0),
            "tfs_z": (0.9, 1, 1.0),
            "top_a": (0.1, 0, 0.0),
            "top_n_sigma": (1.0, -1, -1.0),
            "xtc_probability": (0.5, 0, 0.0),
            "mirostat": (2, 0),
            "min_keep": (5, 0, 1),
            "epsilon_cutoff": (3.0, 0, 0.0),
            "eta_cutoff": (3.0, 0, 0.0),
        },
        "Use 'temperature'; 0 takes the most likely token.": {
            "do_sample": (False,),
            "dynatemp_range": (0.5, 0, 0.0),
            "smoothing_factor": (0.5, 0, 0.0),
        },
        "Use 'frequency_penalty' or 'repetition_penalty'.": {"dry_multiplier": (0.8, 0, 0.0)},
        "Penalties look at the whole answer.": {"repeat_last_n": (64, -1)},
        "Use 'logprobs'.": {"n_probs": (5, 0), "top_n_tokens": (5, 0), "details": (True, False)},
        "Use 'return_token_ids'.": {"return_tokens": (True, False)},
        "Use 'logit_bias'.": {"logits_processors": (["a.b"], []), "penalize_nl": (True, False)},
        "Use 'n' and a 'temperature': beam search is not served.": {
            "use_beam_search": (True, False),
            "length_penalty": (2.0, 1, 1.0),
            "early_stopping": (True, False),
        },
        "Use 'truncate_prompt_tokens'.": {
            "truncate": (100,),
            "truncation_length": (2048,),
            "transforms": (["middle-out"], []),
        },
        "The end of a prompt is kept.": {"truncation_side": ("right", "left")},
        "A prompt that is too long is refused; shorten it.": {"n_keep": (5, 0)},
        "The order of the samplers is fixed.": {"samplers": (["top_k"], [])},
        "Use 'timeout', in seconds.": {"t_max_predict_ms": (500, 0)},
        "Leave it out.": {
            "spaces_between_special_tokens": (False, True),
            "guidance_scale": (1.5, 1, 1.0),
            "negative_prompt": ("a", ""),
            "watermark": (True, False),
        },
        "Name the adapter as the model: `--lora-modules` of the worker gives it a name.": {
            "lora": ([{"id": 0, "scale": 1.0}], [])
        },
        "Name one model in 'model'.": {"models": (["a", "b"], [])},
        "Use 'guided_regex'.": {"regex": ("a+",)},
        "Use 'guided_grammar'.": {"ebnf": ('root ::= "a"',)},
        "Use 'response_format'.": {"format": ("json", "")},
        "Use 'include_stop_str_in_output'.": {"no_stop_trim": (True, False)},
        "Use 'ignore_eos'.": {"ban_eos_token": (True, False)},
        "Use 'stop'.": {"stop_sequences": (["a"], [])},
        "Use 'seed'.": {"random_seed": (5,)},
        "Use 'echo'.": {"return_full_text": (True, False)},
        "Use /v1/embeddings.": {"return_hidden_states": (True, False)},
        "Send a message with the role `system`.": {"system": ("Be brief.",)},
        "Write the parameters into the body itself.": {"options": ({"num_predict": 5}, {})},
        "Offer the tools with 'tools'.": {"plugins": ([{"id": "web"}], []), "grammar_triggers": ([{"type": 0}], [])},
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
            "search_parameters": ({"mode": "on"}, {}),
            "files": ([{"id": "a"}], []),
        },
        "A chat template writes the special tokens itself.": {"add_special_tokens": (True, False)},
        # `deepseek` is served: reasoning stands in a field of its own.
        "Use 'include_reasoning'.": {
            "reasoning_format": ("none", "auto", "deepseek"),
            "separate_reasoning": (False, True),
            "stream_reasoning": (False, True),
        },
        _THINKING: {"thinking_budget": (100,), "thinking_token_budget": (100,)},
        "Use 'chat_template'.": {"template": ("x", "")},
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
    (OpenAi.RESPONSE_FORMAT,): {"Offer the tools with 'tools'.": {"structures": ([{"begin": "a"}], [])}},
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
        "Prompts are cached by their content, and workers are chosen by their caches.": {
            "prompt_cache_key": "a",
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"ttl": "30m"},
            "cache_prompt": True,
            "n_cache_reuse": 0,
        },
        "A worker chooses the slot.": {"id_slot": -1, "slot_id": -1},
        "Models stay loaded.": {"keep_alive": "5m"},
        "Times are in the metrics.": {"timings_per_token": True, "return_progress": True},
        "Send the header `x-request-id`: it names the request everywhere.": {"request_id": "mine", "rid": "mine"},
        "There is one implementation of structured output.": {"guided_decoding_backend": "auto"},
        "There is one provider.": {"provider": {"order": ["a"]}},
        "Whole answers always count tokens; `stream_options` asks a stream to.": {"usage": {"include": True}},
        "It is LiteLLM's own.": {"caching": True},
        "It adjusts a parameter that is not served.": {
            "dynatemp_exponent": 1.0,
            "xtc_threshold": 0.1,
            "mirostat_tau": 5.0,
            "mirostat_eta": 0.1,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["\n"],
            "n_discard": 0,
            "grammar_lazy": False,
            "post_sampling_probs": True,
        },
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
        "n_ctx": 4096,
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
