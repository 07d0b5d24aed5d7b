"""The parameters that would change the answer and are not served, and what to do instead."""

from __future__ import annotations

from gateway.api.schemas.row import Kind, refused

_CHAT = (Kind.CHAT,)
_MESSAGE = (Kind.MESSAGE,)
_PART = (Kind.CONTENT_PART,)
_TOKENIZE = (Kind.TOKENIZE,)
_LEAVE_OUT = "Leave it out."
_ONE_ADAPTER = "Name the model that has the adapter merged into its weights."
_TRUNCATION = "Use 'min_p', 'top_p' or 'top_k'."
_WHITESPACE = (
    "Between the parts of JSON stands one space, or a new line with its indentation. For others use 'grammar'."
)
_TEXT_ONLY = "Send text; this server reads nothing else."


_FOR_TOOLS = "It constrains calls of tools. Offer them with 'tools'."
_STRUCTURED_OUTPUT = (
    refused("structural_tag", _FOR_TOOLS, "{}", (), (Kind.STRUCTURED_OUTPUTS,)),
    refused("structures", _FOR_TOOLS, [{"begin": "a"}], ([],), (Kind.RESPONSE_FORMAT,)),
    refused("triggers", _FOR_TOOLS, ["a"], ([],), (Kind.RESPONSE_FORMAT,)),
    refused("format", _FOR_TOOLS, {"type": "tag"}, (), (Kind.RESPONSE_FORMAT,)),
    refused("disable_any_whitespace", _WHITESPACE, True, (False,), (Kind.STRUCTURED_OUTPUTS,)),
    refused("whitespace_pattern", _WHITESPACE, "[ ]?", (), (Kind.STRUCTURED_OUTPUTS,)),
    refused(
        "disable_additional_properties",
        "Write 'additionalProperties: false' into the schema.",
        True,
        (False,),
        (Kind.STRUCTURED_OUTPUTS,),
    ),
)

_FOREVER = (
    refused("add_special_tokens", "A chat template writes the special tokens itself.", True, (False,), _CHAT),
    refused("audio", _TEXT_ONLY, {"voice": "a"}, (), _CHAT),
    refused("audio", "The sound lies at OpenAI: send its transcript as 'content'.", {"id": "audio_1"}, (), _MESSAGE),
    refused("modalities", _TEXT_ONLY, ["audio"], (["text"],), _CHAT),
    refused("moderation", _LEAVE_OUT, {"model": "omni-moderation-latest"}, (), _CHAT),
    refused("web_search_options", "Put what was found into a message.", {"a": 1}, (), _CHAT),
    refused("length_penalty", "It belongs to beam search, which is not served.", 2.0, (1, 1.0)),
    refused("use_beam_search", "Use 'n' and a 'temperature'.", True, (False,)),
    refused("truncation_side", "The end of a prompt is what is kept.", "right", ("left",)),
    refused("early_stopping", "It belongs to beam search, which is not served.", True, (False,)),
    refused("logits_processors", "Use 'logit_bias'.", ["a.b"], ([],)),
    refused("spaces_between_special_tokens", _LEAVE_OUT, False, (True,)),
    refused("prompt_embeds", "Send the prompt as text or token ids.", "AAAA"),
    refused("kv_transfer_params", "Workers share no memory.", {"a": 1}, ({},)),
    refused("lora_path", _ONE_ADAPTER, "a"),
    refused("lora", _ONE_ADAPTER, [{"id": 0, "scale": 1.0}], ([],)),
    refused("guided_whitespace_pattern", "Write white space into the schema or the grammar.", "[ ]?"),
    refused("do_sample", "Use 'temperature'; 0 takes the most likely token.", False),
    refused("max_new_tokens", "Use 'max_tokens'.", 5),
    refused("num_predict", "Use 'max_tokens'.", 5),
    refused("max_length", "Use 'max_tokens'.", 5),
    refused("n_keep", "A prompt that is too long is refused; shorten it.", 5, (0,)),
    refused("n_probs", "Use 'logprobs'.", 5, (0,)),
    refused("top_n_tokens", "Use 'logprobs'.", 5, (0,)),
    refused("details", "Use 'logprobs'.", True, (False,)),
    refused("return_tokens", "Use 'return_token_ids'.", True, (False,)),
    refused("repeat_last_n", "Penalties look at the whole answer.", 64, (-1,)),
    refused("typical_p", _TRUNCATION, 0.9, (1, 1.0)),
    refused("tfs_z", _TRUNCATION, 0.9, (1, 1.0)),
    refused("top_a", _TRUNCATION, 0.1, (0, 0.0)),
    refused("top_n_sigma", _TRUNCATION, 1.0, (-1, -1.0)),
    refused("xtc_probability", _TRUNCATION, 0.5, (0, 0.0)),
    refused("mirostat", _TRUNCATION, 2, (0,)),
    refused("dynatemp_range", "Use 'temperature'.", 0.5, (0, 0.0)),
    refused("dry_multiplier", "Use 'frequency_penalty' or 'repetition_penalty'.", 0.8, (0, 0.0)),
    refused("samplers", "The order of the samplers is fixed.", ["top_k"], ([],)),
    refused("t_max_predict_ms", "Use 'timeout', in seconds.", 500, (0,)),
    refused("image_url", _TEXT_ONLY, {"url": "data:image/png;base64,"}, (), _PART),
    refused("input_audio", _TEXT_ONLY, {"data": ""}, (), _PART),
    refused("file", _TEXT_ONLY, {"file_id": "a"}, (), _PART),
    refused("video_url", _TEXT_ONLY, {"url": "https://example.com/a.mp4"}, (), _PART),
    refused("audio_url", _TEXT_ONLY, {"url": "https://example.com/a.mp3"}, (), _PART),
    refused("return_token_strs", _LEAVE_OUT, True, (False,), _TOKENIZE),
)

REFUSED = (*_STRUCTURED_OUTPUT, *_FOREVER)
