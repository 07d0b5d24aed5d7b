"""Names of OpenAI's and vLLM's that are not served: what to do instead, or why they change nothing."""

from __future__ import annotations

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


GENERATION: tuple[Kind, ...] = (OpenAi.CHAT, OpenAi.COMPLETION)


def harmless(name: str, note: str, example: object, kinds: tuple[Kind, ...] = GENERATION) -> Row:
    """Return the row of a name that changes nothing in either generation."""
    return ignored(name, note, example, *kinds)


def unserved(
    name: str,
    instead: str,
    example: object,
    without_effect: tuple[object, ...] = (),
    kinds: tuple[Kind, ...] = GENERATION,
) -> Row:
    """Return the row of a name that would change either generation and is not served."""
    return refused(name, instead, example, without_effect, *kinds)


_MESSAGE = (OpenAi.MESSAGE,)
_CHAT = (OpenAi.CHAT,)
_PART = (OpenAi.CONTENT_PART,)
_TOKENIZE = (OpenAi.TOKENIZE,)
_LEAVE_OUT = "Leave it out."
_ONE_ADAPTER = "Name the model that has the adapter merged into its weights."
_TRUNCATION = "Use 'min_p', 'top_p' or 'top_k'."
_WHITESPACE = (
    "Between the parts of JSON stands one space, or a new line with its indentation. For others use 'grammar'."
)
_TEXT_ONLY = "Send text; this server reads nothing else."


_FOR_TOOLS = "It constrains calls of tools. Offer them with 'tools'."
_STRUCTURED_OUTPUT = (
    unserved("structural_tag", _FOR_TOOLS, "{}", (), (OpenAi.STRUCTURED_OUTPUTS,)),
    unserved("structures", _FOR_TOOLS, [{"begin": "a"}], ([],), (OpenAi.RESPONSE_FORMAT,)),
    unserved("triggers", _FOR_TOOLS, ["a"], ([],), (OpenAi.RESPONSE_FORMAT,)),
    unserved("format", _FOR_TOOLS, {"type": "tag"}, (), (OpenAi.RESPONSE_FORMAT,)),
    unserved("disable_any_whitespace", _WHITESPACE, True, (False,), (OpenAi.STRUCTURED_OUTPUTS,)),
    unserved("whitespace_pattern", _WHITESPACE, "[ ]?", (), (OpenAi.STRUCTURED_OUTPUTS,)),
    unserved(
        "disable_additional_properties",
        "Write 'additionalProperties: false' into the schema.",
        True,
        (False,),
        (OpenAi.STRUCTURED_OUTPUTS,),
    ),
)

_FOREVER = (
    unserved("add_special_tokens", "A chat template writes the special tokens itself.", True, (False,), _CHAT),
    unserved("audio", _TEXT_ONLY, {"voice": "a"}, (), _CHAT),
    unserved("audio", "The sound lies at OpenAI: send its transcript as 'content'.", {"id": "audio_1"}, (), _MESSAGE),
    unserved("modalities", _TEXT_ONLY, ["audio"], (["text"],), _CHAT),
    unserved("moderation", _LEAVE_OUT, {"model": "omni-moderation-latest"}, (), _CHAT),
    unserved("web_search_options", "Put what was found into a message.", {"a": 1}, (), _CHAT),
    unserved("length_penalty", "It belongs to beam search, which is not served.", 2.0, (1, 1.0)),
    unserved("use_beam_search", "Use 'n' and a 'temperature'.", True, (False,)),
    unserved("truncation_side", "The end of a prompt is what is kept.", "right", ("left",)),
    unserved("early_stopping", "It belongs to beam search, which is not served.", True, (False,)),
    unserved("logits_processors", "Use 'logit_bias'.", ["a.b"], ([],)),
    unserved("spaces_between_special_tokens", _LEAVE_OUT, False, (True,)),
    unserved("prompt_embeds", "Send the prompt as text or token ids.", "AAAA"),
    unserved("kv_transfer_params", "Workers share no memory.", {"a": 1}, ({},)),
    unserved("lora_path", _ONE_ADAPTER, "a"),
    unserved("lora", _ONE_ADAPTER, [{"id": 0, "scale": 1.0}], ([],)),
    unserved("guided_whitespace_pattern", "Write white space into the schema or the grammar.", "[ ]?"),
    unserved("do_sample", "Use 'temperature'; 0 takes the most likely token.", False),
    unserved("max_new_tokens", "Use 'max_tokens'.", 5),
    unserved("num_predict", "Use 'max_tokens'.", 5),
    unserved("max_length", "Use 'max_tokens'.", 5),
    unserved("n_keep", "A prompt that is too long is refused; shorten it.", 5, (0,)),
    unserved("n_probs", "Use 'logprobs'.", 5, (0,)),
    unserved("top_n_tokens", "Use 'logprobs'.", 5, (0,)),
    unserved("details", "Use 'logprobs'.", True, (False,)),
    unserved("return_tokens", "Use 'return_token_ids'.", True, (False,)),
    unserved("repeat_last_n", "Penalties look at the whole answer.", 64, (-1,)),
    unserved("typical_p", _TRUNCATION, 0.9, (1, 1.0)),
    unserved("tfs_z", _TRUNCATION, 0.9, (1, 1.0)),
    unserved("top_a", _TRUNCATION, 0.1, (0, 0.0)),
    unserved("top_n_sigma", _TRUNCATION, 1.0, (-1, -1.0)),
    unserved("xtc_probability", _TRUNCATION, 0.5, (0, 0.0)),
    unserved("mirostat", _TRUNCATION, 2, (0,)),
    unserved("dynatemp_range", "Use 'temperature'.", 0.5, (0, 0.0)),
    unserved("dry_multiplier", "Use 'frequency_penalty' or 'repetition_penalty'.", 0.8, (0, 0.0)),
    unserved("samplers", "The order of the samplers is fixed.", ["top_k"], ([],)),
    unserved("t_max_predict_ms", "Use 'timeout', in seconds.", 500, (0,)),
    unserved("image_url", _TEXT_ONLY, {"url": "data:image/png;base64,"}, (), _PART),
    unserved("input_audio", _TEXT_ONLY, {"data": ""}, (), _PART),
    unserved("file", _TEXT_ONLY, {"file_id": "a"}, (), _PART),
    unserved("video_url", _TEXT_ONLY, {"url": "https://example.com/a.mp4"}, (), _PART),
    unserved("audio_url", _TEXT_ONLY, {"url": "https://example.com/a.mp3"}, (), _PART),
    unserved("return_token_strs", _LEAVE_OUT, True, (False,), _TOKENIZE),
)

_HARMLESS = (
    harmless("store", "Answers of this endpoint are not kept for later.", True),
    harmless("metadata", "Labels of kept answers; none are kept.", {"task": "a"}),
    harmless("service_tier", "There is one tier. The lane of a request is chosen by how it is sent.", "auto"),
    harmless("safety_identifier", "Names the end user to OpenAI.", "someone"),
    harmless("prompt_cache_key", "Prompts are cached by their content, and workers are chosen by what they hold.", "a"),
    harmless("prompt_cache_retention", "The cache keeps what is used, for as long as it has room.", "24h"),
    harmless("prompt_cache_options", "The cache keeps what is used, for as long as it has room.", {"ttl": "30m"}),
    harmless("cache_prompt", "Prompts are always cached.", True),
    harmless("id_slot", "A worker chooses the slot.", -1),
    harmless("n_cache_reuse", "Prompts are cached in blocks.", 0),
    harmless("slot_id", "A worker chooses the slot.", -1),
    harmless("keep_alive", "Models stay loaded.", "5m"),
    harmless("timings_per_token", "Times are in the metrics.", True),
    harmless("return_progress", "A stream says nothing of a prompt's progress.", True),
    harmless("request_id", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    harmless("rid", "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    harmless("data_parallel_rank", "The queue chooses the worker.", 0),
    harmless("guided_decoding_backend", "There is one implementation of structured output.", "auto"),
    harmless("disable_fallback", "There is one implementation.", True, (OpenAi.STRUCTURED_OUTPUTS,)),
    harmless("mm_processor_kwargs", "For images and sounds, which are not read.", {"fps": 1}),
    harmless("include_obfuscation", "Streams are never padded.", False, (OpenAi.STREAM_OPTIONS,)),
    harmless("annotations", "Notes of an earlier answer about its sources; no template reads them.", [], _MESSAGE),
    harmless("id", "Name of an earlier answer.", "msg_1", _MESSAGE),
    harmless("provider_specific_fields", "LiteLLM's notes on an earlier answer.", {"a": 1}, _MESSAGE),
    harmless("reasoning_details", "The text stands in `reasoning` too.", [], _MESSAGE),
    harmless("thinking_blocks", "The text stands in `reasoning_content` too.", [], _MESSAGE),
    harmless("signature", "Proves to Anthropic that its model has thought so.", "a", (OpenAi.CONTENT_PART,)),
    harmless("closed", "Whether the thought was complete.", True, (OpenAi.CONTENT_PART,)),
    harmless("parsed", "OpenAI's SDK puts it beside the content that it was made of.", {"a": 1}, _MESSAGE),
    harmless("parsed_arguments", "OpenAI's SDK puts them beside `arguments`.", {"a": 1}, (OpenAi.CALLED_FUNCTION,)),
    harmless("index", "Calls stand in their order.", 0, (OpenAi.TOOL_CALL,)),
    harmless("provider_specific_fields", "LiteLLM's notes on an earlier call.", {"a": 1}, (OpenAi.TOOL_CALL,)),
    harmless("cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (OpenAi.TOOL, OpenAi.FUNCTION)),
    harmless("weight", "Used in training only.", 1, _MESSAGE),
    harmless(
        "cache_control", "Prompts are always cached.", {"type": "ephemeral"}, (OpenAi.MESSAGE, OpenAi.CONTENT_PART)
    ),
    harmless("prompt_cache_breakpoint", "Prompts are always cached.", {"mode": "explicit"}, (OpenAi.CONTENT_PART,)),
    harmless("annotations", "Notes of an earlier answer about its sources.", [], (OpenAi.CONTENT_PART,)),
)


_TOOL = (OpenAi.TOOL,)
_THINKING = "Use 'reasoning_effort', or the variables of the model's template in 'chat_template_kwargs'."
_LAST_TURN = "Use 'continue_final_message' with 'add_generation_prompt: false'."
_ONE_MODEL = "Name one model in 'model'."


def _adjusts(name: str, other: str, example: object) -> Row:
    return harmless(name, f"It adjusts `{other}`, which is not served.", example)


_LLAMA_CPP = (
    _adjusts("dynatemp_exponent", "dynatemp_range", 1.0),
    _adjusts("xtc_threshold", "xtc_probability", 0.1),
    _adjusts("mirostat_tau", "mirostat", 5.0),
    _adjusts("mirostat_eta", "mirostat", 0.1),
    _adjusts("dry_base", "dry_multiplier", 1.75),
    _adjusts("dry_allowed_length", "dry_multiplier", 2),
    _adjusts("dry_penalty_last_n", "dry_multiplier", -1),
    _adjusts("dry_sequence_breakers", "dry_multiplier", ["\n"]),
    _adjusts("n_discard", "n_keep", 0),
    _adjusts("grammar_lazy", "grammar_triggers", False),
    _adjusts("post_sampling_probs", "n_probs", True),
    harmless("backend_sampling", "The worker chooses where it samples.", True),
    harmless("sse_ping_interval", "Silent streams are kept alive.", 15),
    unserved("n_indent", "Use 'grammar'.", 4, (0,)),
    unserved("n_cmpl", "Use 'n'.", 2, (1,)),
    unserved("min_keep", _TRUNCATION, 5, (0, 1)),
    unserved("penalize_nl", "Use 'logit_bias'.", True, (False,)),
    unserved("grammar_triggers", "Use 'tools'.", [{"type": 0}], ([],)),
    unserved("response_fields", "Pick the fields out of the answer.", ["content"], ([],)),
    # `deepseek` is what is served: reasoning stands in a field of its own.
    unserved("reasoning_format", "Use 'include_reasoning'.", "none", ("auto", "deepseek"), _CHAT),
    unserved("thinking_forced_open", _THINKING, True, (False,), _CHAT),
    unserved("parse_tool_calls", "Use 'tools'.", False, (True,), _CHAT),
    unserved("image_data", _TEXT_ONLY, [{"data": ""}], ([],)),
)

_SGLANG = (
    unserved("regex", "Use 'guided_regex'.", "a+"),
    unserved("ebnf", "Use 'guided_grammar'.", 'root ::= "a"'),
    unserved("no_stop_trim", "Use 'include_stop_str_in_output'.", True, (False,)),
    unserved("separate_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    unserved("stream_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    unserved("return_hidden_states", "Use /v1/embeddings.", True, (False,)),
    unserved("custom_logit_processor", "Use 'logit_bias'.", "x"),
    unserved("session_params", "Send the whole conversation; what is repeated of it is cached.", {"id": "a"}),
    harmless("return_cached_tokens_details", "Usage counts the cached tokens.", True),
    harmless("custom_params", "They are for a `custom_logit_processor`.", {"a": 1}),
)

_VLLM = (
    unserved("thinking_token_budget", _THINKING, 100, (), _CHAT),
    unserved("repetition_detection", "Use 'frequency_penalty'.", {"max_pattern_size": 5}),
    unserved("vllm_xargs", "It is for extensions of another server.", {"a": 1}, ({},)),
    harmless("media_io_kwargs", "For images and sounds, which are not read.", {"video": {}}),
)

_OTHERS = (
    unserved("budget_tokens", _THINKING, 100, (), (OpenAi.CHAT_THINKING,)),
    unserved("max_tokens", _THINKING, 100, (), (OpenAi.CHAT_REASONING,)),
    harmless("summary", "Reasoning is told whole.", "auto", (OpenAi.CHAT_REASONING,)),
    unserved("thinking_budget", _THINKING, 100, (), _CHAT),
    unserved("custom", "Describe it as a function: `type: function`.", {"name": "f"}, (), _TOOL),
    *(
        unserved(name, "Put it into `function`, beside which only `type` stands.", example, (), _TOOL)
        for name, example in (("name", "f"), ("description", "Adds."), ("parameters", {}), ("strict", True))
    ),
    unserved("prefix", _LAST_TURN, True, (False,), _MESSAGE),
    unserved("partial", _LAST_TURN, True, (False,), _MESSAGE),
    unserved("images", _TEXT_ONLY, ["AAAA"], ([],), _MESSAGE),
    unserved("system", "Send a message with the role `system`.", "Be brief."),
    unserved("random_seed", "Use 'seed'.", 5),
    unserved("safe_prompt", "Write what the prompt is to say into a message.", True, (False,)),
    unserved("prompt_mode", _THINKING, "reasoning", (), _CHAT),
    unserved("options", "Write the parameters into the body itself.", {"num_predict": 5}, ({},)),
    unserved("format", "Use 'response_format'.", "json", ("",)),
    unserved("raw", "Use /v1/completions.", True, (False,)),
    unserved("template", "Use 'chat_template'.", "x", ("",), _CHAT),
    unserved("decoder_input_details", "Use 'prompt_logprobs'.", True, (False,)),
    unserved("return_full_text", "Use 'echo'.", True, (False,)),
    unserved("truncate", "Use 'truncate_prompt_tokens'.", 100),
    unserved("stop_sequences", "Use 'stop'.", ["a"], ([],)),
    unserved("watermark", "Leave it out.", True, (False,)),
    unserved("adapter_id", _ONE_ADAPTER, "a"),
    unserved("max_tokens_to_sample", "Use 'max_tokens'.", 5),
    unserved("negative_prompt", "Leave it out.", "a", ("",)),
    unserved("guidance_scale", "Leave it out.", 1.5, (1, 1.0)),
    unserved("epsilon_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    unserved("eta_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    unserved("smoothing_factor", "Use 'temperature'.", 0.5, (0, 0.0)),
    unserved("ban_eos_token", "Use 'ignore_eos'.", True, (False,)),
    unserved("truncation_length", "Use 'truncate_prompt_tokens'.", 2048),
    unserved("models", _ONE_MODEL, ["a", "b"], ([],)),
    unserved("route", _ONE_MODEL, "fallback"),
    unserved("plugins", "Use 'tools'.", [{"id": "web"}], ([],)),
    unserved("transforms", "Shorten the prompt, or use 'truncate_prompt_tokens'.", ["middle-out"], ([],)),
    unserved("data_sources", "Put what was found into a message.", [{"type": "a"}], ([],)),
    unserved("search_parameters", "Put what was found into a message.", {"mode": "on"}, ({},)),
    harmless("provider", "There is one provider.", {"order": ["a"]}),
    harmless("usage", "Whole answers always count tokens; `stream_options` asks a stream to.", {"include": True}),
    harmless("caching", "It is LiteLLM's own.", True),
    harmless(
        "extra_content", "Another provider's notes on an earlier answer.", {"google": {}}, (*_MESSAGE, OpenAi.TOOL_CALL)
    ),
    harmless("id", "Names the answer in the client.", "a", (OpenAi.CHAT,)),
    harmless("status", "Whether an earlier answer was complete.", "completed", _MESSAGE),
    harmless("type", "What stands among messages is a message.", "message", _MESSAGE),
    harmless("timestamp", "When the message was written.", 1, _MESSAGE),
    harmless("created_at", "When the message was written.", 1, _MESSAGE),
)


# What clients send for themselves or their own servers: what it is, who sends it, and the file that does.
OF_CLIENTS = tuple(
    harmless(name, f"{note} Sent by {client} (`{source}`).", example)
    for note, client, source, examples in (
        (
            "Names or describes a chat in the client.",
            "Open WebUI's browser, whose direct connections may pass it on",
            "src/lib/components/chat/Chat.svelte",
            {
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
        ),
        (
            "Names a conversation in the client.",
            "LibreChat",
            "packages/data-provider/src/schemas.ts",
            {"conversationId": "a", "conversation_id": "a", "thread_id": "a"},
        ),
        (
            "Names a trace for those who watch.",
            "clients of OpenRouter and of Langfuse",
            "openrouter.ai/docs/guides/features/broadcast",
            {"trace": {"trace_id": "a"}, "trace_id": "a", "generation_name": "a"},
        ),
        (
            "How Ollama loads a model; here that is the operator's choice.",
            "clients of Ollama, and Open WebUI's advanced parameters",
            "backend/open_webui/utils/payload.py",
            {
                "num_ctx": 4096,
                "n_ctx": 4096,
                "num_gpu": 1,
                "num_thread": 8,
                "num_batch": 512,
                "use_mmap": True,
                "use_mlock": False,
            },
        ),
    )
    for name, example in examples.items()
)
_FOR_TEMPLATES = tuple(
    harmless(name, "A completion has no chat template that could think.", example, (OpenAi.COMPLETION,))
    for name, example in {
        "chat_template_kwargs": {"enable_thinking": False},
        "enable_thinking": False,
        "thinking": {"type": "disabled"},
        "think": False,
        "reasoning": {"enabled": False},
        "reasoning_effort": "low",
    }.items()
)
_MISPLACED = (
    unserved("input", "Name the list 'messages'; 'input' belongs to /v1/responses and /v1/embeddings.", "x", (), _CHAT),
    unserved("instructions", "Send a message with the role `system`; it belongs to /v1/responses.", "x", (), _CHAT),
    unserved("query", "It belongs to /v1/rerank.", "x", (), _CHAT),
)
_OF_APPLICATIONS = (
    unserved("files", "Put what the files say into a message.", [{"id": "a"}], ([],), _CHAT),
    unserved("tool_ids", "Offer the tools themselves with 'tools'.", ["a"], ([],), _CHAT),
    unserved("skill_ids", "Put what the skills say into a message.", ["a"], ([],), _CHAT),
    unserved("params", "Write the parameters into the body itself.", {"temperature": 0.5}, ({},), _CHAT),
    unserved("web_search", "Put what was found into a message.", True, (False,), _CHAT),
)

UNSERVED = (
    *_STRUCTURED_OUTPUT,
    *_FOREVER,
    *_HARMLESS,
    *_LLAMA_CPP,
    *_SGLANG,
    *_VLLM,
    *_OTHERS,
    *OF_CLIENTS,
    *_FOR_TEMPLATES,
    *_MISPLACED,
    *_OF_APPLICATIONS,
)
