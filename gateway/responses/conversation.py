"""From the items of a conversation to the messages that a chat template gets.

An assistant's reasoning, text and calls are separate items and one message. Items that follow one another in this order
become one message; an item out of order begins the next one. What a summary stands for is left out, but for the
messages of other roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gateway.api.schemas.checks import invalid_value, missing_parameter, require_text, unsupported_parameter
from gateway.api.schemas.conversation import AssistantTurn
from gateway.responses.body import ItemBody, PartBody
from gateway.responses.compaction import COMPACTION, PREFACE, remaining
from gateway.responses.items import HOSTED_ITEMS, HostedItem, is_left_out
from gateway.responses.tools import NamespacedName
from shared.conversation import ChatMessage, ToolCall

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def to_messages(
    items: Sequence[ItemBody], num_earlier: int = 0, names: Mapping[str, NamespacedName] | None = None
) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation, of which the first `num_earlier` items are from earlier requests.

    `names` are those of functions in namespaces, by the names that the model sees.

    Raises:
        ApiError: 400; `param` names the item that is not served or not complete.
    """
    return _Conversation(num_earlier, names or {}).read(items)


class _Conversation:
    def __init__(self, num_earlier: int, names: Mapping[str, NamespacedName]) -> None:
        self._shown_names = {name: shown for shown, name in names.items()}
        self._num_earlier = num_earlier
        self._messages: list[ChatMessage] = []
        self._turn: AssistantTurn | None = None
        self._names: dict[str, str] = {}

    def read(self, items: Sequence[ItemBody]) -> tuple[ChatMessage, ...]:
        for index, item in remaining(items):
            self._add(item, f"input.[{index - self._num_earlier}]")
        self._end_turn()
        return tuple(self._messages)

    def _add(self, item: ItemBody, where: str) -> None:
        kind = item.type or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_call_output(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind == COMPACTION:
            self._add_summary(item, where)
        elif kind in HOSTED_ITEMS:
            self._add_hosted(item, HOSTED_ITEMS[kind], where)
        else:
            message = f"'{where}' is of type '{kind[:64]}', which this server does not serve."
            raise unsupported_parameter(f"{where}.type", message)

    def _add_message(self, item: ItemBody, where: str) -> None:
        if item.role not in _ROLES:
            raise invalid_value(f"{where}.role", f"'{where}.role' must be one of {', '.join(_ROLES)}.")
        text = _text(item.content, f"{where}.content")
        if item.role != "assistant":
            self._end_turn()
            self._messages.append(ChatMessage(role=item.role, content=text))
            return
        turn = self._turn
        if turn is None or turn.content or turn.calls:
            turn = self._new_turn()
        turn.content.append(text)

    def _add_reasoning(self, item: ItemBody, where: str) -> None:
        turn = self._turn
        if turn is None or turn.content or turn.calls:
            turn = self._new_turn()
        if item.content:
            turn.reasoning.append(_text(item.content, f"{where}.content"))
        elif item.summary:
            turn.reasoning.append(_text(item.summary, f"{where}.summary"))

    def _add_summary(self, item: ItemBody, where: str) -> None:
        if item.content is None:
            raise missing_parameter(f"{where}.encrypted_content")
        self._end_turn()
        text = f"{PREFACE}\n\n{_text(item.content, f'{where}.content')}"
        self._messages.append(ChatMessage(role="user", content=text))

    def _add_call(self, item: ItemBody, where: str) -> None:
        call_id = _required(item.call_id, f"{where}.call_id")
        name = _required(item.name, f"{where}.name")
        arguments = require_text(f"{where}.arguments", item.arguments or "{}")
        if item.namespace is not None:
            # A function that is offered no more keeps its own name.
            name = self._shown_names.get(NamespacedName(item.namespace, name), name)
        self._names[call_id] = name
        turn = self._turn or self._new_turn()
        turn.calls.append(ToolCall(id=call_id, name=name, arguments=arguments))

    def _add_hosted(self, item: ItemBody, form: HostedItem, where: str) -> None:
        if is_left_out(item):
            return
        # A local shell's result names its call as its own id; a patch that was applied may say nothing.
        call_id, output = item.call_id or item.id, "" if item.output is None else item.output
        item = replace(item, call_id=call_id, name=item.name or form.name, output=output)
        if form.arguments is not None:
            self._add_call(item, where)
        if form.output:
            self._add_call_output(item, where)

    def _add_call_output(self, item: ItemBody, where: str) -> None:
        text = _text(item.output, f"{where}.output")
        if item.call_id is None and item.name:
            # Codex tells so what its own tools have to say unasked. Chat templates know results of calls only.
            self._end_turn()
            self._messages.append(ChatMessage(role="user", content=text))
            return
        call_id = _required(item.call_id, f"{where}.call_id")
        self._end_turn()
        name = item.name or self._names.get(call_id)
        self._messages.append(ChatMessage(role="tool", content=text, name=name, tool_call_id=call_id))

    def _new_turn(self) -> AssistantTurn:
        self._end_turn()
        self._turn = AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None


def _required(value: str | None, where: str) -> str:
    if not value:
        raise missing_parameter(where)
    return require_text(where, value)


def _text(content: str | Sequence[PartBody] | None, where: str) -> str:
    if content is None:
        raise missing_parameter(where, "a string or a list of text parts")
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{where}.[{i}]") for i, part in enumerate(content))


def _part_text(part: PartBody, where: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXT_PARTS:
        message = f"'{where}' is of type '{part.type[:64]}'; only text is served."
        raise unsupported_parameter(f"{where}.type", message)
    if part.text is None:
        raise invalid_value(f"{where}.text", f"'{where}' is a text part without 'text'.")
    return part.text
