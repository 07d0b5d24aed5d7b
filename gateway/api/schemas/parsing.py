"""From the bodies of chat completions, text completions and the tokenizer's endpoints to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from gateway.api.schemas.bodies import OPENAI_NAMES, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.schemas.checks import checked_model, estimate_tokens, invalid_value
from gateway.api.schemas.conversation import content_text, conversation_prompt, flatten_messages
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.images import Images
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.parameters import (
    CommonBody,
    check_names,
    check_sequences,
    check_stream_options,
    counted,
    details,
    num_logprobs,
    one_of,
    prompt_logprobs,
    to_sampling,
    with_best_of,
)
from gateway.api.schemas.shared_fields import is_deterministic, left_out, openai_hints
from gateway.api.schemas.structured_output import asked_output, constrained
from gateway.api.schemas.template_options import chat_options, may_reason, template_variables
from gateway.api.schemas.thinking import chat_thinking
from gateway.api.schemas.tools import OfferedTools, offered_functions, offered_tools
from gateway.api.schemas.unserved_names import OpenAi
from gateway.generation import Details, Generation, ImageSource, Kind, Prompt, StructuredOutput
from shared.kv_budget import KvBudget
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall

DEFAULT_MAX_TOKENS = 16

_chat_reader = BodyReader(OPENAI_NAMES, OpenAi.CHAT, ChatBody)
_completion_reader = BodyReader(OPENAI_NAMES, OpenAi.COMPLETION, CompletionBody)
_tokenize_reader = BodyReader(OPENAI_NAMES, OpenAi.TOKENIZE, TokenizeBody)
_detokenize_reader = BodyReader(OPENAI_NAMES, OpenAi.DETOKENIZE, DetokenizeBody)


def parse_chat(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn a chat completion body into a generation; `rules` as in `BodyReader.read`."""
    chat = _chat_reader.read(body, rules)
    check_names(chat)
    output = asked_output(chat)
    logprobs = _chat_logprobs(chat)
    images = Images()
    messages = flatten_messages(chat.messages, images)
    tools = _tools(chat)
    thinking = chat_thinking(chat, chat.chat_template_kwargs)
    variables = template_variables(chat.chat_template_kwargs, thinking, chat.documents, chat.verbosity)
    options = chat_options(chat, messages, tools.template, variables)
    return _generation(
        chat,
        "chat",
        (conversation_prompt(messages, options, images),),
        _chat_max_tokens(chat),
        logprobs,
        output,
        details(chat, opening=messages[-1].content if chat.echo and messages[-1].role == "assistant" else ""),
        prediction=None if chat.prediction is None else content_text(chat.prediction.content, "prediction.content"),
        tools=tools.use,
        may_reason=may_reason(variables),
        includes_reasoning=thinking.is_included,
    )


def parse_completion(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn a text completion body into a generation; `rules` as in `BodyReader.read`."""
    completion = _completion_reader.read(body, rules)
    check_names(completion)
    output = asked_output(completion)
    logprobs = num_logprobs(completion.logprobs)
    echoed = logprobs if completion.echo else None
    return _generation(
        completion,
        "completion",
        _prompts(completion, completion.n or 1),
        _completion_max_tokens(completion),
        logprobs,
        output,
        details(completion, echoes_logprobs=echoed is not None),
        echoed,
        echo=bool(completion.echo),
        add_special_tokens=completion.add_special_tokens is not False,
    )


def parse_tokenize(body: bytes, rules: BodyRules = STRICT) -> tuple[str | None, TokenizeCall, tuple[ImageSource, ...]]:
    """Return the model, if one is named, the call to make, and the images of its conversation.

    Special tokens are added to a text by default, and not to a conversation, whose template already has them.
    """
    parsed = _tokenize_reader.read(body, rules)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise invalid_value("prompt", "Give exactly one of 'prompt' and 'messages'.")
    messages = options = None
    images = Images()
    if parsed.messages is not None:
        messages = flatten_messages(parsed.messages, images)
        tools = offered_tools(parsed.tools, None).template
        options = chat_options(parsed, messages, tools, template_variables(parsed.chat_template_kwargs))
    special = messages is None if parsed.add_special_tokens is None else parsed.add_special_tokens
    call = TokenizeCall(text=parsed.prompt, messages=messages, add_special_tokens=special, chat=options)
    return _named_model(parsed.model), call, tuple(images.sources)


def parse_detokenize(body: bytes, rules: BodyRules = STRICT) -> tuple[str | None, DetokenizeCall]:
    """Return the model, if one is named, and the call to make."""
    parsed = _detokenize_reader.read(body, rules)
    return _named_model(parsed.model), DetokenizeCall(token_ids=tuple(parsed.tokens))


def prompts_of(
    given: str | list[str | int | list[int]], where: str, of_text: Callable[[str, str], Prompt]
) -> tuple[Prompt, ...]:
    """Return the prompts in the field `where`; `of_text` makes one of a text and its place."""
    if isinstance(given, str):
        return (of_text(given, where),)
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return (_token_prompt(cast("list[int]", given), where),)
    if kinds == {str}:
        return tuple(of_text(text, f"{where}.[{i}]") for i, text in enumerate(cast("list[str]", given)))
    if kinds == {list}:
        return tuple(_token_prompt(ids, f"{where}.[{i}]") for i, ids in enumerate(cast("list[list[int]]", given)))
    message = f"'{where}' must be a string, or a list of strings, of token ids, or of token id lists."
    raise invalid_value(where, message)


def _token_prompt(token_ids: list[int], where: str) -> Prompt:
    if not token_ids:
        raise invalid_value(where, f"'{where}' must not be empty.")
    return Prompt(estimated_tokens=len(token_ids), token_ids=tuple(token_ids))


def _generation(
    body: CommonBody,
    kind: Kind,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
    output: StructuredOutput | None,
    shown: Details | None,
    echoed: int | None = None,
    **more: Any,
) -> Generation:
    limit, budget, options = body.truncate_prompt_tokens, body.kv_budget, body.stream_options
    given = (body.prompt_cache_key, body.prompt_cache_retention, body.agent_hints)
    generation = Generation(
        kind=kind,
        model=body.model,
        prompts=counted(prompts, limit),
        n=body.n or 1,
        sampling=constrained(to_sampling(body, max_tokens, logprobs, prompt_logprobs(body, echoed)), output),
        structured_output=output,
        deterministic=is_deterministic(body),
        left_out=left_out(body),
        stream=bool(body.stream),
        include_usage=check_stream_options(body),
        is_resumable=options is not None and bool(options.resumable),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        details=shown,
        truncate_prompt_tokens=limit,
        cache_salt=body.cache_salt,
        cache_hints=None if given == (None, None, None) else openai_hints(body),
        kv_budget=None if budget is None else KvBudget(budget.tokens, budget.policy or "sinks"),
        **more,
    )
    return generation if body.best_of is None else with_best_of(generation, body.best_of)


def _tools(chat: ChatBody) -> OfferedTools:
    if chat.functions is None and chat.function_call is None:
        return offered_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls is not False)
    if chat.tools is not None or chat.tool_choice is not None:
        raise invalid_value("functions", "Give either 'tools' or 'functions'; 'tools' is the newer form.")
    return offered_functions(chat.functions, chat.function_call)


def _chat_max_tokens(chat: ChatBody) -> int | None:
    asked: int | None = one_of(chat, "max_tokens", "n_predict")
    if asked == 0:
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1, or -1 for no limit.")
    if chat.max_completion_tokens is not None:
        return chat.max_completion_tokens
    return None if asked is None or asked < 0 else asked


def _completion_max_tokens(completion: CompletionBody) -> int | None:
    asked: int | None = one_of(completion, "max_tokens", "n_predict")
    if asked is None:
        return DEFAULT_MAX_TOKENS
    if asked == 0 and not (completion.echo or completion.prompt_logprobs is not None):
        raise invalid_value("max_tokens", "'max_tokens' is invalid: expected integer >= 1, -1, or 0 with 'echo'.")
    return None if asked < 0 else asked


def _chat_logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs:
        return num_logprobs(chat.top_logprobs) or 0
    if chat.top_logprobs:
        raise invalid_value("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return None


def _prompts(completion: CompletionBody, n: int) -> tuple[Prompt, ...]:
    given, suffix = completion.prompt, completion.suffix or None
    is_one = isinstance(given, str) or isinstance(given[0], int)
    check_sequences(1 if is_one else len(given), n)

    def of_text(text: str, where: str) -> Prompt:
        tokens = estimate_tokens(text) + (0 if suffix is None else estimate_tokens(suffix))
        return Prompt(estimated_tokens=tokens, text=text, suffix=suffix)

    prompts = prompts_of(given, "prompt", of_text)
    if suffix is not None and prompts[0].text is None:
        raise invalid_value("suffix", "'suffix' needs a 'prompt' that is a text or a list of texts.")
    return prompts


def _named_model(model: str | None) -> str | None:
    return None if model is None else checked_model(model)
