"""Names that the clients of other servers send: what is refused because it would change the answer, and what is not.

A name that only adjusts another one (the threshold of a sampler that is off) changes nothing while that one is refused.
"""

from __future__ import annotations

from gateway.api.schemas.row import GENERATION, Kind, Row, ignored, refused

_CHAT = (Kind.CHAT,)
_MESSAGE = (Kind.MESSAGE,)
_TOOL = (Kind.TOOL,)
_TRUNCATION = "Use 'min_p', 'top_p' or 'top_k'."
_THINKING = "Use 'reasoning_effort', or the variables of the model's template in 'chat_template_kwargs'."
_LAST_TURN = "Use 'continue_final_message' with 'add_generation_prompt: false'."
_ONE_MODEL = "Name one model in 'model'."


def _adjusts(name: str, other: str, example: object) -> Row:
    return ignored(name, f"It adjusts `{other}`, which is not served.", example)


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
    ignored("backend_sampling", "The worker chooses where it samples.", True),
    ignored("sse_ping_interval", "Silent streams are kept alive.", 15),
    refused("n_indent", "Use 'grammar'.", 4, (0,)),
    refused("n_cmpl", "Use 'n'.", 2, (1,)),
    refused("min_keep", _TRUNCATION, 5, (0, 1)),
    refused("penalize_nl", "Use 'logit_bias'.", True, (False,)),
    refused("grammar_triggers", "Use 'tools'.", [{"type": 0}], ([],)),
    refused("response_fields", "Pick the fields out of the answer.", ["content"], ([],)),
    # `deepseek` is what is served: reasoning stands in a field of its own.
    refused("reasoning_format", "Use 'include_reasoning'.", "none", ("auto", "deepseek"), _CHAT),
    refused("thinking_forced_open", _THINKING, True, (False,), _CHAT),
    refused("parse_tool_calls", "Use 'tools'.", False, (True,), _CHAT),
    refused("image_data", "Send text; this server reads nothing else.", [{"data": ""}], ([],)),
)

_SGLANG = (
    refused("regex", "Use 'guided_regex'.", "a+"),
    refused("ebnf", "Use 'guided_grammar'.", 'root ::= "a"'),
    refused("no_stop_trim", "Use 'include_stop_str_in_output'.", True, (False,)),
    refused("separate_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    refused("stream_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    refused("return_hidden_states", "Use /v1/embeddings.", True, (False,)),
    refused("custom_logit_processor", "Use 'logit_bias'.", "x"),
    refused("session_params", "Send the whole conversation; what is repeated of it is cached.", {"id": "a"}),
    ignored("return_cached_tokens_details", "Usage counts the cached tokens.", True),
    ignored("custom_params", "They are for a `custom_logit_processor`.", {"a": 1}),
)

_VLLM = (
    refused("thinking_token_budget", _THINKING, 100, (), _CHAT),
    refused("repetition_detection", "Use 'frequency_penalty'.", {"max_pattern_size": 5}),
    refused("vllm_xargs", "It is for extensions of another server.", {"a": 1}, ({},)),
    ignored("media_io_kwargs", "For images and sounds, which are not read.", {"video": {}}),
)

_OTHERS = (
    refused("budget_tokens", _THINKING, 100, (), (Kind.CHAT_THINKING,)),
    refused("max_tokens", _THINKING, 100, (), (Kind.CHAT_REASONING,)),
    ignored("summary", "Reasoning is told whole.", "auto", (Kind.CHAT_REASONING,)),
    refused("thinking_budget", _THINKING, 100, (), _CHAT),
    refused("custom", "Describe it as a function: `type: function`.", {"name": "f"}, (), _TOOL),
    *(
        refused(name, "Put it into `function`, beside which only `type` stands.", example, (), _TOOL)
        for name, example in (("name", "f"), ("description", "Adds."), ("parameters", {}), ("strict", True))
    ),
    refused("prefix", _LAST_TURN, True, (False,), _MESSAGE),
    refused("partial", _LAST_TURN, True, (False,), _MESSAGE),
    refused("images", "Send text; this server reads nothing else.", ["AAAA"], ([],), _MESSAGE),
    refused("system", "Send a message with the role `system`.", "Be brief."),
    refused("random_seed", "Use 'seed'.", 5),
    refused("safe_prompt", "Write what the prompt is to say into a message.", True, (False,)),
    refused("prompt_mode", _THINKING, "reasoning", (), _CHAT),
    refused("options", "Write the parameters into the body itself.", {"num_predict": 5}, ({},)),
    refused("format", "Use 'response_format'.", "json", ("",)),
    refused("raw", "Use /v1/completions.", True, (False,)),
    refused("template", "Use 'chat_template'.", "x", ("",), _CHAT),
    refused("decoder_input_details", "Use 'prompt_logprobs'.", True, (False,)),
    refused("return_full_text", "Use 'echo'.", True, (False,)),
    refused("truncate", "Use 'truncate_prompt_tokens'.", 100),
    refused("stop_sequences", "Use 'stop'.", ["a"], ([],)),
    refused("watermark", "Leave it out.", True, (False,)),
    refused("adapter_id", "Name the model that has the adapter merged into its weights.", "a"),
    refused("max_tokens_to_sample", "Use 'max_tokens'.", 5),
    refused("negative_prompt", "Leave it out.", "a", ("",)),
    refused("guidance_scale", "Leave it out.", 1.5, (1, 1.0)),
    refused("epsilon_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    refused("eta_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    refused("smoothing_factor", "Use 'temperature'.", 0.5, (0, 0.0)),
    refused("ban_eos_token", "Use 'ignore_eos'.", True, (False,)),
    refused("truncation_length", "Use 'truncate_prompt_tokens'.", 2048),
    refused("models", _ONE_MODEL, ["a", "b"], ([],)),
    refused("route", _ONE_MODEL, "fallback"),
    refused("plugins", "Use 'tools'.", [{"id": "web"}], ([],)),
    refused("transforms", "Shorten the prompt, or use 'truncate_prompt_tokens'.", ["middle-out"], ([],)),
    refused("data_sources", "Put what was found into a message.", [{"type": "a"}], ([],)),
    refused("search_parameters", "Put what was found into a message.", {"mode": "on"}, ({},)),
    ignored("provider", "There is one provider.", {"order": ["a"]}),
    ignored("usage", "Whole answers always count tokens; `stream_options` asks a stream to.", {"include": True}),
    ignored("caching", "It is LiteLLM's own.", True),
    ignored(
        "extra_content", "Another provider's notes on an earlier answer.", {"google": {}}, (*_MESSAGE, Kind.TOOL_CALL)
    ),
    ignored("id", "Names the answer in the client.", "a", (Kind.CHAT,)),
    ignored("status", "Whether an earlier answer was complete.", "completed", _MESSAGE),
    ignored("type", "What stands among messages is a message.", "message", _MESSAGE),
    ignored("timestamp", "When the message was written.", 1, _MESSAGE),
    ignored("created_at", "When the message was written.", 1, _MESSAGE),
)


# What clients send for themselves or their own servers: what it is, who sends it, and the file that does.
_CLIENTS = tuple(
    ignored(name, f"{note} Sent by {client} (`{source}`).", example, (*GENERATION, Kind.RESPONSE))
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
    ignored(name, "A completion has no chat template that could think.", example, (Kind.COMPLETION,))
    for name, example in {
        "chat_template_kwargs": {"enable_thinking": False},
        "enable_thinking": False,
        "thinking": {"type": "disabled"},
        "think": False,
        "reasoning": {"enabled": False},
        "reasoning_effort": "low",
    }.items()
)
_OF_CLIENTS_SERVERS = (
    refused("files", "Put what the files say into a message.", [{"id": "a"}], ([],), _CHAT),
    refused("tool_ids", "Offer the tools themselves with 'tools'.", ["a"], ([],), _CHAT),
    refused("skill_ids", "Put what the skills say into a message.", ["a"], ([],), _CHAT),
    refused("params", "Write the parameters into the body itself.", {"temperature": 0.5}, ({},), _CHAT),
    refused("web_search", "Put what was found into a message.", True, (False,), _CHAT),
)

OF_OTHER_SERVERS = (*_LLAMA_CPP, *_SGLANG, *_VLLM, *_OTHERS, *_CLIENTS, *_FOR_TEMPLATES, *_OF_CLIENTS_SERVERS)
