"""From the bodies of Anthropic's API to generations, or to prompts to count.

One turn of blocks may become several messages of a chat template: each result of a tool is a message of its own, before
the text of its turn. So are the results of tools that Anthropic's server ran amid a turn of the assistant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import msgspec
from msgspec import Raw

from gateway.anthropic.body import BlockBody, CountTokensBody, MessageBody, MessagesBody, PromptBody, SourceBody
from gateway.anthropic.names import (
    ANTHROPIC_NAMES,
    HOSTED_CALLS,
    HOSTED_RESULTS,
    NO_TEXT,
    Anthropic,
    check_block_fields,
)
from gateway.anthropic.tools import message_tools
from gateway.api.schemas.checks import (
    checked_model,
    given,
    invalid_value,
    missing_parameter,
    require_text,
    unsupported_parameter,
)
from gateway.api.schemas.conversation import AssistantTurn, conversation_prompt
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.images import Images, MixedContent, image_at, image_of
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.shared_fields import cache_hints, left_out, seed_of, ttl_s
from gateway.api.schemas.structured_output import constrained, schema_output
from gateway.api.schemas.template_options import may_reason, template_variables
from gateway.api.schemas.thinking import Thinking, agreed, named_switches
from gateway.generation import Generation, ImageSource, Prompt, StructuredOutput
from shared.conversation import ChatMessage, ChatOptions, ToolCall
from shared.sampling import Sampling
from shared.tokenizer_calls import TokenizeCall

_SEPARATOR = "\n\n"
_HOSTED = HOSTED_CALLS | HOSTED_RESULTS
_REASONS = MappingProxyType(
    {
        "compaction": "It stands for earlier turns at Anthropic's server alone: send them, or their summary as text.",
        "container_upload": "The file lies at Anthropic's server: send its text in a document.",
        "tool_result": "It may stand in a turn of the user alone.",
        "image": "It may stand in a turn of the user and in the result of a tool alone.",
        **dict.fromkeys(
            (*_HOSTED, "tool_use", "thinking", "redacted_thinking"), "It may stand in a turn of the assistant alone."
        ),
    }
)


def chat_messages(body: PromptBody, images: Images) -> tuple[ChatMessage, ...]:
    """Return the conversation, the system prompt first; what it shows is added to `images`."""
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(ChatMessage(role="system", content=_text(body.system, "system")))
    answered = _answered_calls(body)
    for index, message in enumerate(body.messages):
        where = f"messages.[{index}].content"
        messages += _turn(message, where, answered, images)
    return tuple(messages)


def _answered_calls(body: PromptBody) -> AbstractSet[str | None]:
    """Return the ids of calls that Anthropic's server ran and whose results are in this turn or a later one."""
    turns = [message.content for message in body.messages if isinstance(message.content, list)]
    return {block.tool_use_id for turn in turns for block in turn if block.type in HOSTED_RESULTS}


def _turn(message: MessageBody, where: str, answered: AbstractSet[str | None], images: Images) -> Iterable[ChatMessage]:
    match message.role:
        case "assistant":
            return _assistant(message, where, answered)
        case "system":
            return (ChatMessage(role="system", content=_text(message.content, where)),)
        case "user":
            return _user(message, where, images)


def _user(message: MessageBody, where: str, images: Images) -> Iterator[ChatMessage]:
    if isinstance(message.content, str):
        yield ChatMessage(role="user", content=message.content)
        return
    content = MixedContent(images, _SEPARATOR)
    for block, place in _with_places(message.content, where):
        if block.type == "tool_result":
            yield _tool_result(block, place, images=images)
        else:
            _add(content, block, place)
    if content.texts or content.shown:
        yield ChatMessage(role="user", content=content.text, **content.fields)


def _assistant(message: MessageBody, where: str, answered: AbstractSet[str | None]) -> Iterator[ChatMessage]:
    if isinstance(message.content, str):
        yield ChatMessage(role="assistant", content=message.content)
        return
    turn, has_hosted = AssistantTurn(), False
    for block, place in _with_places(message.content, where):
        has_hosted = has_hosted or block.type in _HOSTED
        if block.type in HOSTED_RESULTS:
            if not turn.is_empty:
                yield turn.message()
                turn = AssistantTurn()
            yield _tool_result(block, place, NO_TEXT)
        elif block.type == "tool_use" or (block.type in HOSTED_CALLS and block.id in answered):
            turn.calls.append(_tool_call(block, place))
        elif block.type == "thinking":
            turn.reasoning.append(require_text(f"{place}.thinking", _required(block.thinking, f"{place}.thinking")))
        elif block.type not in HOSTED_CALLS and block.type != "redacted_thinking":
            # A hosted call without its result is left out: templates refuse a call that nothing answers.
            turn.content.append(_block_text(block, place))
    if not (turn.is_empty and has_hosted):
        yield turn.message()


def _tool_call(block: BlockBody, place: str) -> ToolCall:
    arguments = bytes(given(block.input) or b"").decode()
    if not arguments.startswith("{"):
        raise invalid_value(f"{place}.input", f"'{place}.input' must be an object.")
    return ToolCall(
        id=require_text(f"{place}.id", _required(block.id, f"{place}.id")),
        name=require_text(f"{place}.name", _required(block.name, f"{place}.name")),
        arguments=arguments,
    )


def _tool_result(block: BlockBody, place: str, otherwise: str = "", images: Images | None = None) -> ChatMessage:
    content = _mixed(block.content or "", f"{place}.content", images)
    if not (content.text or content.shown):
        content.texts = [otherwise]
    if block.is_error:
        content.texts = [f"Error: {content.texts[0] if content.texts else ''}", *content.texts[1:]]
    call_id = require_text(f"{place}.tool_use_id", _required(block.tool_use_id, f"{place}.tool_use_id"))
    return ChatMessage(role="tool", content=content.text, tool_call_id=call_id, **content.fields)


def _text(content: str | list[BlockBody], where: str) -> str:
    return _mixed(content, where, None).text


def _mixed(content: str | list[BlockBody], where: str, images: Images | None) -> MixedContent:
    mixed = MixedContent(images, _SEPARATOR)
    if isinstance(content, str):
        mixed.texts.append(content)
        return mixed
    for block, place in _with_places(content, where):
        _add(mixed, block, place)
    return mixed


def _add(content: MixedContent, block: BlockBody, place: str) -> None:
    if block.type == "image":
        content.show(_image(block, place))
    else:
        content.texts.append(_block_text(block, place))


def _image(block: BlockBody, place: str) -> ImageSource:
    source, where = block.source, f"{place}.source"
    if isinstance(source, SourceBody):
        if source.type == "base64":
            return image_of(_required(source.data, f"{where}.data"), None, f"{where}.data")
        if source.type == "url":
            return image_at(_required(source.url, f"{where}.url"), None, f"{where}.url")
        if source.type == "file":
            return ImageSource(f"{where}.file_id", file_id=_required(source.file_id, f"{where}.file_id"))
    message = f"'{where}' must be {{type: base64, data: ...}}, {{type: url, url: ...}} or {{type: file, file_id: ...}}."
    raise invalid_value(where, message)


def _block_text(block: BlockBody, place: str) -> str:
    match block.type:
        case "text":
            return _required(block.text, f"{place}.text")
        case "document":
            return _document(block, place)
        case "search_result":
            return _search_result(block, place)
    others = "Supported are text, image, document, search_result, thinking, tool_use and tool_result."
    reason = _REASONS.get(block.type, others)
    raise unsupported_parameter(
        place, f"'{place}' has the type '{block.type[:64]}', which is not supported here. {reason}"
    )


def _document(block: BlockBody, place: str) -> str:
    source = block.source
    if not isinstance(source, SourceBody) or source.type not in ("text", "content"):
        forms = "{type: text, data: ...} or {type: content, content: ...}"
        message = f"'{place}.source' must be text: {forms}. PDFs and files that lie elsewhere are not read here."
        raise unsupported_parameter(f"{place}.source", message)
    if source.type == "content":
        text = _plain_text(source.content, f"{place}.source.content")
    else:
        text = _required(source.data, f"{place}.source.data")
    if source.media_type not in (None, "text/plain"):
        raise invalid_value(f"{place}.source.media_type", f"'{place}.source.media_type' must be 'text/plain'.")
    return "\n\n".join(part for part in (block.title, block.context, text) if part is not None)


def _search_result(block: BlockBody, place: str) -> str:
    if not isinstance(block.source, str):
        raise invalid_value(f"{place}.source", f"'{place}.source' must be a string, such as the address of a page.")
    head = f"{_required(block.title, f'{place}.title')}\n{block.source}"
    return f"{head}\n\n{_plain_text(block.content, f'{place}.content')}"


def _plain_text(content: str | list[BlockBody] | None, where: str) -> str:
    """Return what a document or a result of a search holds. Blocks within blocks would have no end."""
    if content is None:
        raise missing_parameter(where, "a string or a list of text blocks")
    if isinstance(content, str):
        return content
    for block, place in _with_places(content, where):
        if block.type != "text":
            raise unsupported_parameter(
                place, f"'{place}' has the type '{block.type[:64]}'; only text may stand there."
            )
    return _text(content, where)


def _with_places(blocks: Iterable[BlockBody], where: str) -> Iterator[tuple[BlockBody, str]]:
    for index, block in enumerate(blocks):
        yield block, f"{where}.[{index}]"


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise missing_parameter(name)
    return value


_messages_reader = BodyReader(ANTHROPIC_NAMES, Anthropic.MESSAGES, MessagesBody)
_count_reader = BodyReader(ANTHROPIC_NAMES, Anthropic.COUNT_TOKENS, CountTokensBody)


def parse_messages(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn the body of a message into a generation; `rules` as in `BodyReader.read`."""
    parsed = _messages_reader.read(body, rules)
    if not rules.allow_unknown:
        check_block_fields(parsed)
    output = _output(parsed)
    tools = message_tools(parsed)
    return Generation(
        kind="chat",
        model=checked_model(parsed.model),
        prompts=(_prompt(parsed, tools.template),),
        n=1,
        sampling=constrained(_sampling(parsed), output),
        structured_output=output,
        deterministic=parsed.temperature == 0,
        left_out=left_out(parsed),
        stream=bool(parsed.stream),
        tools=tools.use,
        may_reason=may_reason(_variables(parsed)),
        includes_reasoning=parsed.thinking is None or parsed.thinking.display != "omitted",
        is_resumable=_is_resumable(parsed),
        cache_hints=cache_hints(parsed.agent_hints, _retain_s(parsed)),
    )


def parse_count_tokens(body: bytes, rules: BodyRules = STRICT) -> tuple[str, TokenizeCall, tuple[ImageSource, ...]]:
    """Return the model, the call that counts a prompt's tokens, and its images; `rules` as in `BodyReader.read`."""
    parsed = _count_reader.read(body, rules)
    if not rules.allow_unknown:
        check_block_fields(parsed)
    prompt = _prompt(parsed, message_tools(parsed).template)
    call = TokenizeCall(messages=prompt.messages, add_special_tokens=False, chat=prompt.chat)
    return checked_model(parsed.model), call, prompt.images


def _is_resumable(body: MessagesBody) -> bool:
    if body.stream_options is None or not body.stream_options.resumable:
        return False
    if not body.stream:
        raise invalid_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return True


def _retain_s(body: MessagesBody) -> float:
    blocks = list(body.system) if isinstance(body.system, list) else []
    for message in body.messages:
        blocks += message.content if isinstance(message.content, list) else ()
    controls = [body.cache_control, *(tool.cache_control for tool in body.tools or ())]
    controls += [block.cache_control for block in blocks]
    return max([ttl_s(control) for control in controls], default=0.0)


def _prompt(body: PromptBody, tools: str | None) -> Prompt:
    images = Images()
    messages = chat_messages(body, images)
    # A turn may end with the result of a tool that Anthropic's server ran.
    is_continued = bool(messages) and messages[-1].role == "assistant"
    variables = _variables(body)
    options = ChatOptions(
        tools=tools,
        variables=msgspec.json.encode(variables).decode() if variables else None,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
    )
    return conversation_prompt(messages, options, images)


def _variables(body: PromptBody) -> dict[str, Raw]:
    is_on, effort = None, None
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        is_on = body.thinking.type == "enabled"
    if isinstance(body, MessagesBody) and body.output_config is not None and body.output_config.effort is not None:
        # Templates know three steps.
        effort = body.output_config.effort if body.output_config.effort in ("low", "medium") else "high"
    if is_on is not None:
        agreed({"thinking": is_on, **named_switches(body.chat_template_kwargs)})
    return template_variables(body.chat_template_kwargs, Thinking(is_on, effort))


def _sampling(body: MessagesBody) -> Sampling:
    for stop in body.stop_sequences or ():
        require_text("stop_sequences", stop)
    return Sampling(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=seed_of(None, body.temperature),
        stop=tuple([stop for stop in body.stop_sequences or () if stop]),
    )


def _output(body: MessagesBody) -> StructuredOutput | None:
    in_config = None if body.output_config is None else body.output_config.format
    if in_config is not None and body.output_format is not None:
        raise invalid_value("output_format", "Give 'output_format' or 'output_config.format', not both.")
    if in_config is not None:
        return schema_output("output_config.format.schema", in_config.schema, strict=True)
    if body.output_format is not None:
        return schema_output("output_format.schema", body.output_format.schema, strict=True)
    return None
