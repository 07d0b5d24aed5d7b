"""The parameters that would change the answer and are not served, and what to do instead."""

from __future__ import annotations

from gateway.api.schemas.row import GENERATION, Kind, Row, Use

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


def _row(
    name: str,
    instead: str,
    example: object,
    without_effect: tuple[object, ...] = (),
    kinds: tuple[Kind, ...] = GENERATION,
) -> Row:
    return Row(name, kinds, instead, example, without_effect, use=Use.REFUSED)


_FOR_TOOLS = "It constrains calls of tools. Offer them with 'tools'."
_STRUCTURED_OUTPUT = (
    _row("structural_tag", _FOR_TOOLS, "{}", (), (Kind.STRUCTURED_OUTPUTS,)),
    _row("structures", _FOR_TOOLS, [{"begin": "a"}], ([],), (Kind.RESPONSE_FORMAT,)),
    _row("triggers", _FOR_TOOLS, ["a"], ([],), (Kind.RESPONSE_FORMAT,)),
    _row("format", _FOR_TOOLS, {"type": "tag"}, (), (Kind.RESPONSE_FORMAT,)),
    _row("disable_any_whitespace", _WHITESPACE, True, (False,), (Kind.STRUCTURED_OUTPUTS,)),
    _row("whitespace_pattern", _WHITESPACE, "[ ]?", (), (Kind.STRUCTURED_OUTPUTS,)),
    _row(
        "disable_additional_properties",
        "Write 'additionalProperties: false' into the schema.",
        True,
        (False,),
        (Kind.STRUCTURED_OUTPUTS,),
    ),
)

_FOREVER = (
    _row("add_special_tokens", "A chat template writes the special tokens itself.", True, (False,), _CHAT),
    _row("audio", _TEXT_ONLY, {"voice": "a"}, (), _CHAT),
    _row("audio", "The sound lies at OpenAI: send its transcript as 'content'.", {"id": "audio_1"}, (), _MESSAGE),
    _row("modalities", _TEXT_ONLY, ["audio"], (["text"],), _CHAT),
    _row("moderation", _LEAVE_OUT, {"model": "omni-moderation-latest"}, (), _CHAT),
    _row("web_search_options", "Put what was found into a message.", {"a": 1}, (), _CHAT),
    _row("length_penalty", "It belongs to beam search, which is not served.", 2.0, (1, 1.0)),
    _row("use_beam_search", "Use 'n' and a 'temperature'.", True, (False,)),
    _row("truncation_side", "The end of a prompt is what is kept.", "right", ("left",)),
    _row("early_stopping", "It belongs to beam search, which is not served.", True, (False,)),
    _row("logits_processors", "Use 'logit_bias'.", ["a.b"], ([],)),
    _row("spaces_between_special_tokens", _LEAVE_OUT, False, (True,)),
    _row("prompt_embeds", "Send the prompt as text or token ids.", "AAAA"),
    _row("kv_transfer_params", "Workers share no memory.", {"a": 1}, ({},)),
    _row("lora_path", _ONE_ADAPTER, "a"),
    _row("lora", _ONE_ADAPTER, [{"id": 0, "scale": 1.0}], ([],)),
    _row("guided_whitespace_pattern", "Write white space into the schema or the grammar.", "[ ]?"),
    _row("do_sample", "Use 'temperature'; 0 takes the most likely token.", False),
    _row("max_new_tokens", "Use 'max_tokens'.", 5),
    _row("num_predict", "Use 'max_tokens'.", 5),
    _row("max_length", "Use 'max_tokens'.", 5),
    _row("num_ctx", "The model's context length is the operator's choice.", 4096),
    _row("n_ctx", "The model's context length is the operator's choice.", 4096),
    _row("n_keep", "A prompt that is too long is refused; shorten it.", 5, (0,)),
    _row("n_probs", "Use 'logprobs'.", 5, (0,)),
    _row("top_n_tokens", "Use 'logprobs'.", 5, (0,)),
    _row("details", "Use 'logprobs'.", True, (False,)),
    _row("return_tokens", "Use 'return_token_ids'.", True, (False,)),
    _row("repeat_last_n", "Penalties look at the whole answer.", 64, (-1,)),
    _row("typical_p", _TRUNCATION, 0.9, (1, 1.0)),
    _row("tfs_z", _TRUNCATION, 0.9, (1, 1.0)),
    _row("top_a", _TRUNCATION, 0.1, (0, 0.0)),
    _row("top_n_sigma", _TRUNCATION, 1.0, (-1, -1.0)),
    _row("xtc_probability", _TRUNCATION, 0.5, (0, 0.0)),
    _row("mirostat", _TRUNCATION, 2, (0,)),
    _row("dynatemp_range", "Use 'temperature'.", 0.5, (0, 0.0)),
    _row("dry_multiplier", "Use 'frequency_penalty' or 'repetition_penalty'.", 0.8, (0, 0.0)),
    _row("samplers", "The order of the samplers is fixed.", ["top_k"], ([],)),
    _row("t_max_predict_ms", "Use 'timeout', in seconds.", 500, (0,)),
    _row("image_url", _TEXT_ONLY, {"url": "data:image/png;base64,"}, (), _PART),
    _row("input_audio", _TEXT_ONLY, {"data": ""}, (), _PART),
    _row("file", _TEXT_ONLY, {"file_id": "a"}, (), _PART),
    _row("video_url", _TEXT_ONLY, {"url": "https://example.com/a.mp4"}, (), _PART),
    _row("audio_url", _TEXT_ONLY, {"url": "https://example.com/a.mp3"}, (), _PART),
    _row("return_token_strs", _LEAVE_OUT, True, (False,), _TOKENIZE),
)

REFUSED = (*_STRUCTURED_OUTPUT, *_FOREVER)
