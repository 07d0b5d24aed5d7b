"""From the items of a conversation to the messages of a chat template, and compaction.

An assistant's reasoning, text and calls are separate items and one message. Items in this order become one message; an
item out of order begins the next one.

A client asks for compaction with an item `compaction_trigger` at the end of its input, or at
`POST /v1/responses/compact`. The model writes a summary, which the client gets as an item `compaction`, encrypted as
reasoning is, and puts into its next request. Items before the last such item are left out of the prompt, except the
messages to the model. So the client may send the whole conversation on, or the endpoint's answer, or continue a stored
response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, get_args

from msgspec.structs import replace

from gateway.api.schemas.checks import invalid_value, missing_parameter, require_text, unsupported_parameter
from gateway.api.schemas.conversation import AssistantTurn
from gateway.api.schemas.images import AskedDetail, Images, MixedContent, image_at, served_detail
from gateway.generation import ImageSource
from gateway.responses.body import InputItemBody, ItemBody, PartBody, ResponseBody
from gateway.responses.items import HOSTED_ITEMS, HostedItem, is_left_out
from gateway.responses.tools import NamespacedName
from shared.conversation import ChatMessage, ToolCall

TRIGGER = "compaction_trigger"

# Asked of the model after the conversation. No tools are offered beside it.
REQUEST = ChatMessage(
    role="user",
    content=(
        "This conversation has become long and will be replaced by a summary, which you write now. Whoever goes on "
        "with the work sees the summary and the user's messages, and nothing else of the conversation. Say what the "
        "user wants; what was done and found so far, with names, paths, values and decisions exactly as they are; "
        "what is in progress; and what is left to do. Write the summary alone."
    ),
)
# As the user's: a model that finds it last goes on with the work, where it would take an answer of its own for the end.
PREFACE = "What was said here before was left out. This summary, written by the assistant, stands for it:"


def asks_for_compaction(body: ResponseBody, items: Sequence[ItemBody]) -> bool:
    """Whether the last item asks for a summary; `ApiError` 400 if another one does, or for a background response."""
    places = [index for index, item in enumerate(items) if item.type == TRIGGER]
    if not places:
        return False
    if places != [len(items) - 1]:
        where = f"input.[{places[0]}]"
        raise invalid_value(where, f"'{where}' is of type '{TRIGGER}', which may stand once, as the last item.")
    if body.background:
        message = "A conversation is not compacted in the background. Leave 'background' out."
        raise unsupported_parameter("background", message)
    return True


def compacting(body: ResponseBody) -> ResponseBody:
    """Return the body of `POST /v1/responses/compact` as one of `POST /v1/responses` that asks for the same."""
    for name in ("stream", "background", "store"):
        if getattr(body, name):
            message = f"'{name}' is not supported here: the answer is sent whole, and not stored. Leave it out."
            raise unsupported_parameter(name, message)
    given = body.input
    items = [InputItemBody(type="message", role="user", content=given)] if isinstance(given, str) else given or []
    return replace(body, input=[*items, InputItemBody(type=TRIGGER)], store=False)


def user_messages(items: Sequence[ItemBody]) -> list[ItemBody]:
    """Return the messages of the user in a conversation."""
    return [item for item in items if _is_input_message(item) and item.role == "user"]


def _is_input_message(item: ItemBody) -> bool:
    return (item.type or "message") == "message" and item.role != "assistant"


_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def to_messages(
    items: Sequence[ItemBody],
    num_earlier: int = 0,
    names: Mapping[str, NamespacedName] | None = None,
    images: Images | None = None,
) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation, of which the first `num_earlier` items are from earlier requests.

    `names` are those of functions in namespaces, by the names that the model sees. What messages show is added to
    `images`. Errors name earlier items as `previous_response_id.[3]`, counted from the conversation's beginning.
    """
    return _Conversation(num_earlier, names or {}, images or Images()).read(items)


class _Conversation:
    def __init__(self, num_earlier: int, names: Mapping[str, NamespacedName], images: Images) -> None:
        self._images = images
        self._shown_names = {name: shown for shown, name in names.items()}
        self._num_earlier = num_earlier
        self._messages: list[ChatMessage] = []
        self._turn: AssistantTurn | None = None
        self._names: dict[str, str] = {}

    def read(self, items: Sequence[ItemBody]) -> tuple[ChatMessage, ...]:
        last = max((index for index, item in enumerate(items) if item.type == "compaction"), default=0)
        for index, item in enumerate(items):
            if index < last and not _is_input_message(item):
                continue
            own = index - self._num_earlier
            self._add(item, f"input.[{own}]" if own >= 0 else f"previous_response_id.[{index}]")
        self._end_turn()
        return tuple(self._messages)

    def _add(self, item: ItemBody, where: str) -> None:
        match item.type or "message":
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_call_output(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "compaction":
                self._add_summary(item, where)
            case kind if kind in HOSTED_ITEMS:
                self._add_hosted(item, HOSTED_ITEMS[kind], where)
            case kind:
                message = f"'{where}' is of type '{kind[:64]}', which this server does not serve."
                raise unsupported_parameter(f"{where}.type", message)

    def _add_message(self, item: ItemBody, where: str) -> None:
        if item.role not in _ROLES:
            raise invalid_value(f"{where}.role", f"'{where}.role' must be one of {', '.join(_ROLES)}.")
        if item.role != "assistant":
            content = _mixed(item.content, f"{where}.content", self._images)
            self._tell(ChatMessage(role=item.role, content=content.text, **content.fields))
        else:
            text = _text(item.content, f"{where}.content")
            self._turn_before_text().content.append(text)

    def _add_reasoning(self, item: ItemBody, where: str) -> None:
        turn = self._turn_before_text()
        if item.content:
            turn.reasoning.append(_text(item.content, f"{where}.content"))
        elif item.summary:
            turn.reasoning.append(_text(item.summary, f"{where}.summary"))

    def _add_summary(self, item: ItemBody, where: str) -> None:
        if item.content is None:
            raise missing_parameter(f"{where}.encrypted_content")
        text = f"{PREFACE}\n\n{_text(item.content, f'{where}.content')}"
        self._tell(ChatMessage(role="user", content=text))

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
        output = _mixed(item.output, f"{where}.output", self._images)
        if item.call_id is None and item.name:
            # Codex tells so what its own tools have to say unasked. Chat templates know results of calls only.
            self._tell(ChatMessage(role="user", content=output.text, **output.fields))
            return
        call_id = _required(item.call_id, f"{where}.call_id")
        name = item.name or self._names.get(call_id)
        self._tell(ChatMessage(role="tool", content=output.text, name=name, tool_call_id=call_id, **output.fields))

    def _tell(self, message: ChatMessage) -> None:
        self._end_turn()
        self._messages.append(message)

    def _turn_before_text(self) -> AssistantTurn:
        turn = self._turn
        return self._new_turn() if turn is None or turn.content or turn.calls else turn

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
    return _mixed(content, where, None).text


def _mixed(content: str | Sequence[PartBody] | None, where: str, images: Images | None) -> MixedContent:
    if content is None:
        raise missing_parameter(where, "a string or a list of parts")
    mixed = MixedContent(images)
    if isinstance(content, str):
        mixed.texts.append(content)
        return mixed
    for index, part in enumerate(content):
        place = f"{where}.[{index}]"
        if part.type == "input_image":
            mixed.show(_image(part, place))
        else:
            mixed.texts.append(_part_text(part, place))
    return mixed


def _image(part: PartBody, where: str) -> ImageSource:
    if part.detail not in (None, *get_args(AskedDetail)):
        raise invalid_value(f"{where}.detail", f"'{where}.detail' must be one of {', '.join(get_args(AskedDetail))}.")
    if (part.image_url is None) == (part.file_id is None):
        raise invalid_value(where, f"'{where}' needs either 'image_url' or 'file_id'.")
    detail = cast("AskedDetail | None", part.detail)
    if part.image_url is not None:
        return image_at(part.image_url, detail, f"{where}.image_url")
    return ImageSource(f"{where}.file_id", served_detail(detail), file_id=part.file_id)


def _part_text(part: PartBody, where: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXT_PARTS:
        message = f"'{where}' is of type '{part.type[:64]}'; only text and 'input_image' are served."
        raise unsupported_parameter(f"{where}.type", message)
    if part.text is None:
        raise invalid_value(f"{where}.text", f"'{where}' is a text part without 'text'.")
    return part.text
