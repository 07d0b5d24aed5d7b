"""What a body of `POST /v1/chat/completions` asks for."""

from __future__ import annotations

from gateway.api.schemas.best_of import with_best_of
from gateway.api.schemas.bodies import ChatBody
from gateway.api.schemas.conversation import content_text, estimate_messages, flatten_messages
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.api.schemas.openai_names import OPENAI_NAMES
from gateway.api.schemas.parameters import (
    check_names,
    check_sequences,
    check_stream_options,
    checked_truncation,
    counted,
    details,
    num_logprobs,
    one_of,
    prompt_logprobs,
    to_sampling,
)
from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.sampling_fields import is_deterministic, left_out
from gateway.api.schemas.structured_output import asked_output, constrained
from gateway.api.schemas.template_options import (
    chat_options,
    may_reason,
    template_variables,
)
from gateway.api.schemas.thinking import chat_thinking
from gateway.api.schemas.tools import (
    OfferedTools,
    offered_functions,
    offered_tools,
)
from gateway.api.schemas.unserved_names import OpenAi
from gateway.generation import Generation, Prompt
from shared.conversation import ChatMessage

_reader = BodyReader(OPENAI_NAMES, OpenAi.CHAT, ChatBody)


def parse_chat(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn a chat completion body into what is to be generated; `rules` as in `BodyReader.read`.

    Raises:
        ApiError: 400; `param` names the field at fault.
    """
    chat = _reader.read(body, rules)
    check_names(chat)
    output = asked_output(chat)
    n = chat.n or 1
    check_sequences(1, n)
    logprobs = _num_logprobs(chat)
    messages = flatten_messages(chat.messages)
    tools = _tools(chat)
    thinking = chat_thinking(chat, chat.chat_template_kwargs)
    variables = template_variables(chat.chat_template_kwargs, thinking, chat.documents, chat.verbosity)
    options = chat_options(chat, messages, tools.template, variables)
    prompt = Prompt(estimate_messages(messages, options), messages=messages, chat=options)
    limit = checked_truncation(chat.truncate_prompt_tokens)
    generation = Generation(
        kind="chat",
        model=chat.model,
        prompts=counted((prompt,), limit),
        n=n,
        sampling=constrained(to_sampling(chat, _max_tokens(chat), logprobs, prompt_logprobs(chat, None)), output),
        structured_output=output,
        deterministic=is_deterministic(chat),
        left_out=left_out(chat),
        stream=bool(chat.stream),
        include_usage=check_stream_options(chat),
        priority=chat.priority or 0,
        timeout_s=chat.timeout,
        details=details(chat, opening=_opening(chat, messages)),
        truncate_prompt_tokens=limit,
        cache_salt=chat.cache_salt,
        prediction=None if chat.prediction is None else content_text(chat.prediction.content, "prediction.content"),
        tools=tools.use,
        may_reason=may_reason(variables),
        includes_reasoning=thinking.is_included,
    )
    return with_best_of(generation, chat.best_of)


def _tools(chat: ChatBody) -> OfferedTools:
    if chat.functions is None and chat.function_call is None:
        return offered_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls is not False)
    if chat.tools is not None or chat.tool_choice is not None:
        raise invalid_value("functions", "Give either 'tools' or 'functions'; 'tools' is the newer form.")
    return offered_functions(chat.functions, chat.function_call)


def _opening(chat: ChatBody, messages: tuple[ChatMessage, ...]) -> str:
    """Return what the answer begins with: the last message, where it is the assistant's and is to be repeated."""
    return messages[-1].content if chat.echo and messages[-1].role == "assistant" else ""


def _max_tokens(chat: ChatBody) -> int | None:
    asked: int | None = one_of(chat, "max_tokens", "n_predict")
    if asked == 0:
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1, or -1 for no limit.")
    if chat.max_completion_tokens is not None:
        return chat.max_completion_tokens
    return None if asked is None or asked < 0 else asked


def _num_logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs:
        return num_logprobs(chat.top_logprobs) or 0
    if chat.top_logprobs:
        raise invalid_value("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return None
