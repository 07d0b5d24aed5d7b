"""From the body of `POST /v1/responses` to a generation, once the conversation before it has been read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from gateway.api.schemas.checks import checked_model, invalid_value, missing_parameter, unsupported_parameter
from gateway.api.schemas.conversation import conversation_prompt
from gateway.api.schemas.decoding import BodyReader, without_lone_surrogates
from gateway.api.schemas.images import Images
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.shared_fields import is_deterministic, left_out, openai_hints, sampling_of
from gateway.api.schemas.structured_output import constrained
from gateway.api.schemas.template_options import may_reason, template_variables
from gateway.api.schemas.thinking import asked_thinking, switch
from gateway.api.schemas.tools import NO_TOOLS
from gateway.responses.body import ItemBody, ReasoningBody, ResponseBody, TextBody, repeated_format, text_output
from gateway.responses.conversation import REQUEST, asks_for_compaction, to_messages
from gateway.responses.draft import ResponseDraft, ResponseGeneration
from gateway.responses.items import input_item_id, kept_item, new_response_id
from gateway.responses.names import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    RESPONSE_NAMES,
    Responses,
    check_includes,
    check_item_fields,
    check_tool_names,
)
from gateway.responses.tools import (
    NamespacedName,
    ResponseToolChoiceBody,
    flat_functions,
    namespaced_names,
    repeated_tools,
    response_tools,
)
from shared.bounds import MAX_MESSAGES
from shared.conversation import ChatMessage, ChatOptions

_ITEM_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp"}

_reader = BodyReader(RESPONSE_NAMES, Responses.RESPONSE, ResponseBody)


def parse_body(data: bytes, rules: BodyRules = STRICT) -> ResponseBody:
    """Return the body of a request, checked as far as it can be alone; `rules` as in `BodyReader.read`."""
    body = _reader.read(data, rules)
    checked_model(body.model)
    if body.tools and not rules.allow_unknown:
        check_tool_names(without_lone_surrogates(data))
    if isinstance(body.input, list) and not rules.allow_unknown:
        check_item_fields(body.input)
    check_includes(body.include or ())
    if body.background and body.store is False:
        raise invalid_value("store", "A background response is stored: leave 'store' out, or set it to true.")
    if body.background and _has_logprobs(body):
        raise unsupported_parameter("top_logprobs", "A background response has no log probabilities. Leave them out.")
    if body.input is None and body.previous_response_id is None:
        raise missing_parameter("input")
    return body


def to_generation(
    body: ResponseBody, history: Sequence[ItemBody], items: Sequence[ItemBody], ancestors: tuple[str, ...]
) -> ResponseGeneration:
    """Return the generation.

    Args:
        body: The request.
        history: Items of the conversation that it continues.
        items: Its own.
        ancestors: Ids of the responses in `history`, the oldest first.
    """
    functions = flat_functions(body.tools)
    names = namespaced_names(functions)
    is_compaction = asks_for_compaction(body, items)
    items = items[:-1] if is_compaction else items
    # Of a conversation that may be shortened, the images that are left count; before, it has one a message at most.
    images = Images(limit=MAX_MESSAGES) if body.truncation == "auto" else Images()
    messages = to_messages([*history, *items], len(history), names, images)
    if body.instructions:
        # Those of earlier requests are not part of the conversation.
        system = ChatMessage(role="system", content=body.instructions)
        messages = (system, *messages)
    if not messages:
        raise invalid_value("input", "'input' must not be empty.")
    tools = response_tools(functions, body.tool_choice, body.parallel_tool_calls is not False)
    output = text_output(None if body.text is None else body.text.format)
    if is_compaction:
        # A summary is text, whatever form and tools the other turns have.
        messages, tools, output = (*messages, REQUEST), NO_TOOLS, None
    variables = _variables(body)
    num_logprobs = (body.top_logprobs or 0) if _has_logprobs(body) else None
    prompt = conversation_prompt(messages, _options(tools.template, variables), images)
    return ResponseGeneration(
        kind="chat",
        model=body.model,
        prompts=(prompt,),
        n=1,
        sampling=constrained(sampling_of(body, body.max_output_tokens, num_logprobs), output),
        structured_output=output,
        deterministic=is_deterministic(body),
        left_out=left_out(body),
        stream=bool(body.stream),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        cache_hints=openai_hints(body),
        tools=tools.use,
        may_reason=may_reason(variables),
        draft=_draft(body, items, ancestors, names, is_compaction),
        may_truncate=body.truncation == "auto",
        is_mostly_instructions=2 * len(body.instructions or "") > prompt.num_characters,
    )


def _options(tools: str | None, variables: dict[str, Raw]) -> ChatOptions | None:
    options = ChatOptions(tools=tools, variables=msgspec.json.encode(variables).decode() if variables else None)
    return None if options == ChatOptions() else options


def own_items(body: ResponseBody) -> list[ItemBody]:
    """Return the items of a request; a text is a message of the user."""
    if isinstance(body.input, str):
        return [ItemBody(type="message", role="user", content=body.input)]
    return list(body.input or ())


def _draft(
    body: ResponseBody,
    items: Sequence[ItemBody],
    ancestors: tuple[str, ...],
    names: dict[str, NamespacedName],
    is_compaction: bool,
) -> ResponseDraft:
    response_id = new_response_id()
    return ResponseDraft(
        id=response_id,
        created_at=int(time.time()),
        parameters=msgspec.json.encode(_parameters(body)),
        input=[identified_item(item, response_id, index) for index, item in enumerate(items)],
        ancestors=ancestors,
        is_stored=body.store is not False,
        is_background=bool(body.background),
        namespaced_names=names,
        has_encrypted_reasoning=ENCRYPTED_REASONING in (body.include or ()),
        has_logprobs=_has_logprobs(body),
        has_summary=_summary(body) is not None,
        is_compaction=is_compaction,
    )


def _summary(body: ResponseBody) -> str | None:
    """Return the kind of summary that is asked for. All are the whole reasoning."""
    reasoning = body.reasoning
    return None if reasoning is None else reasoning.summary or reasoning.generate_summary


def identified_item(item: ItemBody, response_id: str, index: int) -> ItemBody:
    """Return the item at `index` in the input of a response as it is kept, with an id."""
    kind = item.type or "message"
    item_id = item.id or input_item_id(_ITEM_PREFIXES.get(kind, "msg"), response_id, index)
    return kept_item(msgspec.structs.replace(item, type=kind, id=item_id, status=item.status or "completed"))


def _parameters(body: ResponseBody) -> dict[str, Any]:
    reasoning, text = body.reasoning, body.text or TextBody()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": _summary(body)},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        # Where it is left out, the model's own files may say another than 1.
        "temperature": body.temperature,
        "text": {"format": repeated_format(text.format), "verbosity": text.verbosity or "medium"},
        "tool_choice": _repeated_choice(body.tool_choice),
        "tools": repeated_tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        # A response has a text here.
        "user": body.user if isinstance(body.user, str) else None,
    }


def _has_logprobs(body: ResponseBody) -> bool:
    return bool(body.top_logprobs) or LOGPROBS in (body.include or ())


def _variables(body: ResponseBody) -> dict[str, Raw]:
    reasoning = body.reasoning or ReasoningBody()
    switches = {
        "enable_thinking": body.enable_thinking,
        "thinking": switch(body.thinking),
        "reasoning.enabled": reasoning.enabled,
    }
    thinking = asked_thinking(switches, {"reasoning.effort": reasoning.effort}, body.chat_template_kwargs)
    verbosity = None if body.text is None else body.text.verbosity
    return template_variables(body.chat_template_kwargs, thinking, verbosity=verbosity)


def _repeated_choice(choice: str | ResponseToolChoiceBody | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return {name: value for name, value in msgspec.to_builtins(choice).items() if value is not None}
