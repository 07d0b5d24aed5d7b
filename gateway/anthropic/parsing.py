"""From the bodies of Anthropic's API to generations, or to prompts to count."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.anthropic.body import CountTokensBody, MessagesBody, PromptBody
from gateway.anthropic.conversation import chat_messages
from gateway.anthropic.names import ANTHROPIC_NAMES, Anthropic, check_block_fields
from gateway.anthropic.tools import message_tools
from gateway.api.schemas.checks import checked_model, invalid_value, require_text
from gateway.api.schemas.conversation import conversation_prompt
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.images import Images
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.shared_fields import cache_hints, left_out, seed_of, ttl_s
from gateway.api.schemas.structured_output import constrained, schema_output
from gateway.api.schemas.template_options import may_reason, template_variables
from gateway.api.schemas.thinking import Thinking, agreed, named_switches
from gateway.generation import Generation, ImageSource, Prompt, StructuredOutput
from shared.conversation import ChatOptions
from shared.sampling import Sampling
from shared.tokenizer_calls import TokenizeCall

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
