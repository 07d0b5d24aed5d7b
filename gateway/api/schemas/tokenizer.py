"""What bodies of `POST /tokenize` and `POST /detokenize` ask for, in vLLM's shapes."""

from __future__ import annotations

from gateway.api.schemas.bodies import DetokenizeBody, TokenizeBody
from gateway.api.schemas.conversation import flatten_messages
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.template_options import chat_options, template_variables
from gateway.api.schemas.texts import checked_model
from gateway.api.schemas.tools import offered_tools
from gateway.api.schemas.unserved_names import OpenAi
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall

_tokenize_reader = BodyReader(OPENAI_NAMES, OpenAi.TOKENIZE, TokenizeBody)
_detokenize_reader = BodyReader(OPENAI_NAMES, OpenAi.DETOKENIZE, DetokenizeBody)


def parse_tokenize(body: bytes, rules: BodyRules = STRICT) -> tuple[str | None, TokenizeCall]:
    """Return the model, if one is named, and the call to make.

    Special tokens are added to a text by default, and not to a conversation, whose template already has them.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    parsed = _tokenize_reader.read(body, rules)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise invalid_value("prompt", "Give exactly one of 'prompt' and 'messages'.")
    messages = options = None
    if parsed.messages is not None:
        messages = flatten_messages(parsed.messages)
        tools = offered_tools(parsed.tools, None).template
        options = chat_options(parsed, messages, tools, template_variables(parsed.chat_template_kwargs))
    special = messages is None if parsed.add_special_tokens is None else parsed.add_special_tokens
    call = TokenizeCall(
        text=parsed.prompt,
        messages=messages,
        add_special_tokens=special,
        chat=options,
    )
    return _checked_model(parsed.model), call


def parse_detokenize(body: bytes, rules: BodyRules = STRICT) -> tuple[str | None, DetokenizeCall]:
    """Return the model, if one is named, and the call to make.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    parsed = _detokenize_reader.read(body, rules)
    return _checked_model(parsed.model), DetokenizeCall(token_ids=tuple(parsed.tokens))


def _checked_model(model: str | None) -> str | None:
    return None if model is None else checked_model(model)
