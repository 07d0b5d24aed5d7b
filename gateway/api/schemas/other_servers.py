"""Names that the clients of other servers send: what is refused because it would change the answer, and what is not.

A name that only adjusts another one (the threshold of a sampler that is off) changes nothing while that one is refused.
"""

from __future__ import annotations

from gateway.api.schemas.row import GENERATION, Kind, Row, Use

_CHAT = (Kind.CHAT,)
_MESSAGE = (Kind.MESSAGE,)
_TOOL = (Kind.TOOL,)
_TRUNCATION = "Use 'min_p', 'top_p' or 'top_k'."
_THINKING = "Use 'reasoning_effort', or the variables of the model's template in 'chat_template_kwargs'."
_LAST_TURN = "Use 'continue_final_message' with 'add_generation_prompt: false'."
_ONE_MODEL = "Name one model in 'model'."


def _refused(
    name: str,
    instead: str,
    example: object,
    without_effect: tuple[object, ...] = (),
    kinds: tuple[Kind, ...] = GENERATION,
) -> Row:
    return Row(name, kinds, instead, example, without_effect, use=Use.REFUSED)


def _ignored(name: str, note: str, example: object, kinds: tuple[Kind, ...] = GENERATION) -> Row:
    return Row(name, kinds, note, example, use=Use.IGNORED)


def _adjusts(name: str, other: str, example: object) -> Row:
    return _ignored(name, f"It adjusts `{other}`, which is not served.", example)


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
    _ignored("backend_sampling", "The worker chooses where it samples.", True),
    _ignored("sse_ping_interval", "Silent streams are kept alive.", 15),
    _refused("n_indent", "Use 'grammar'.", 4, (0,)),
    _refused("n_cmpl", "Use 'n'.", 2, (1,)),
    _refused("min_keep", _TRUNCATION, 5, (0, 1)),
    _refused("penalize_nl", "Use 'logit_bias'.", True, (False,)),
    _refused("grammar_triggers", "Use 'tools'.", [{"type": 0}], ([],)),
    _refused("response_fields", "Pick the fields out of the answer.", ["content"], ([],)),
    _refused("reasoning_format", "Use 'include_reasoning'.", "deepseek", ("auto",), _CHAT),
    _refused("thinking_forced_open", _THINKING, True, (False,), _CHAT),
    _refused("parse_tool_calls", "Use 'tools'.", False, (True,), _CHAT),
    _refused("image_data", "Send text; this server reads nothing else.", [{"data": ""}], ([],)),
)

_SGLANG = (
    _refused("regex", "Use 'guided_regex'.", "a+"),
    _refused("ebnf", "Use 'guided_grammar'.", 'root ::= "a"'),
    _refused("no_stop_trim", "Use 'include_stop_str_in_output'.", True, (False,)),
    _refused("separate_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    _refused("stream_reasoning", "Use 'include_reasoning'.", False, (True,), _CHAT),
    _refused("return_hidden_states", "Use /v1/embeddings.", True, (False,)),
    _refused("custom_logit_processor", "Use 'logit_bias'.", "x"),
    _refused("session_params", "Send the whole conversation; what is repeated of it is cached.", {"id": "a"}),
    _ignored("return_cached_tokens_details", "Usage counts the cached tokens.", True),
    _ignored("custom_params", "They are for a `custom_logit_processor`.", {"a": 1}),
)

_VLLM = (
    _refused("thinking_token_budget", _THINKING, 100, (), _CHAT),
    _refused("repetition_detection", "Use 'frequency_penalty'.", {"max_pattern_size": 5}),
    _refused("vllm_xargs", "It is for extensions of another server.", {"a": 1}, ({},)),
    _ignored("media_io_kwargs", "For images and sounds, which are not read.", {"video": {}}),
)

_OTHERS = (
    _refused("enable_thinking", _THINKING, False, (), _CHAT),
    _refused("thinking", _THINKING, {"type": "enabled"}, (), _CHAT),
    _refused("thinking_budget", _THINKING, 100, (), _CHAT),
    _refused("think", _THINKING, True, (), _CHAT),
    _refused("reasoning", _THINKING, {"effort": "high"}, ({},), _CHAT),
    _refused("custom", "Describe it as a function: `type: function`.", {"name": "f"}, (), _TOOL),
    *(
        _refused(name, "Put it into `function`, beside which only `type` stands.", example, (), _TOOL)
        for name, example in (("name", "f"), ("description", "Adds."), ("parameters", {}), ("strict", True))
    ),
    _refused("prefix", _LAST_TURN, True, (False,), _MESSAGE),
    _refused("partial", _LAST_TURN, True, (False,), _MESSAGE),
    _refused("images", "Send text; this server reads nothing else.", ["AAAA"], ([],), _MESSAGE),
    _refused("system", "Send a message with the role `system`.", "Be brief."),
    _refused("random_seed", "Use 'seed'.", 5),
    _refused("safe_prompt", "Write what the prompt is to say into a message.", True, (False,)),
    _refused("prompt_mode", _THINKING, "reasoning", (), _CHAT),
    _refused("options", "Write the parameters into the body itself.", {"num_predict": 5}, ({},)),
    _refused("format", "Use 'response_format'.", "json", ("",)),
    _refused("raw", "Use /v1/completions.", True, (False,)),
    _refused("template", "Use 'chat_template'.", "x", ("",), _CHAT),
    _refused("decoder_input_details", "Use 'prompt_logprobs'.", True, (False,)),
    _refused("return_full_text", "Use 'echo'.", True, (False,)),
    _refused("truncate", "Use 'truncate_prompt_tokens'.", 100),
    _refused("stop_sequences", "Use 'stop'.", ["a"], ([],)),
    _refused("watermark", "Leave it out.", True, (False,)),
    _refused("adapter_id", "Name the model that has the adapter merged into its weights.", "a"),
    _refused("max_tokens_to_sample", "Use 'max_tokens'.", 5),
    _refused("negative_prompt", "Leave it out.", "a", ("",)),
    _refused("guidance_scale", "Leave it out.", 1.5, (1, 1.0)),
    _refused("epsilon_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    _refused("eta_cutoff", _TRUNCATION, 3.0, (0, 0.0)),
    _refused("smoothing_factor", "Use 'temperature'.", 0.5, (0, 0.0)),
    _refused("ban_eos_token", "Use 'ignore_eos'.", True, (False,)),
    _refused("truncation_length", "Use 'truncate_prompt_tokens'.", 2048),
    _refused("models", _ONE_MODEL, ["a", "b"], ([],)),
    _refused("route", _ONE_MODEL, "fallback"),
    _refused("plugins", "Use 'tools'.", [{"id": "web"}], ([],)),
    _refused("transforms", "Shorten the prompt, or use 'truncate_prompt_tokens'.", ["middle-out"], ([],)),
    _refused("data_sources", "Put what was found into a message.", [{"type": "a"}], ([],)),
    _refused("search_parameters", "Put what was found into a message.", {"mode": "on"}, ({},)),
    _ignored("provider", "There is one provider.", {"order": ["a"]}),
    _ignored("usage", "Whole answers always count tokens; `stream_options` asks a stream to.", {"include": True}),
    _ignored("caching", "It is LiteLLM's own.", True),
    _ignored(
        "extra_content", "Another provider's notes on an earlier answer.", {"google": {}}, (*_MESSAGE, Kind.TOOL_CALL)
    ),
    _ignored("status", "Whether an earlier answer was complete.", "completed", _MESSAGE),
    _ignored("type", "What stands among messages is a message.", "message", _MESSAGE),
    _ignored("timestamp", "When the message was written.", 1, _MESSAGE),
    _ignored("created_at", "When the message was written.", 1, _MESSAGE),
)

OF_OTHER_SERVERS = (*_LLAMA_CPP, *_SGLANG, *_VLLM, *_OTHERS)
