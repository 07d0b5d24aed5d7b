"""Names that the clients of other servers send: what is refused because it would change the answer, and what is not.

A name that only adjusts another one (the threshold of a sampler that is off) changes nothing while that one is refused.
"""

from __future__ import annotations

from gateway.api.schemas.names import Row
from gateway.api.schemas.unserved_names import OpenAi, harmless, unserved

_CHAT = (OpenAi.CHAT,)
_MESSAGE = (OpenAi.MESSAGE,)
_TOOL = (OpenAi.TOOL,)
_TRUNCATION = "Use 'min_p', 'top_p' or 'top_k'."
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
    unserved("image_data", "Send text; this server reads nothing else.", [{"data": ""}], ([],)),
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
    unserved("images", "Send text; this server reads nothing else.", ["AAAA"], ([],), _MESSAGE),
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
    unserved("adapter_id", "Name the model that has the adapter merged into its weights.", "a"),
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

OF_OTHER_SERVERS = (
    *_LLAMA_CPP,
    *_SGLANG,
    *_VLLM,
    *_OTHERS,
    *OF_CLIENTS,
    *_FOR_TEMPLATES,
    *_MISPLACED,
    *_OF_APPLICATIONS,
)
