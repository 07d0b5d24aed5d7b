"""Compaction: the model writes a summary of a conversation, which then stands for all of it but the user's messages.

A client asks for it with an item `compaction_trigger` at the end of its input, or at `POST /v1/responses/compact`. It
gets an item `compaction` with the summary, encrypted as reasoning is, and puts it into its next request. What stands
before the last such item is left out of the prompt, but for what was said to the model: so the client may send the
whole conversation on, or what the endpoint has answered, or go on from a stored response.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.api.schemas.checks import invalid_value, unsupported_parameter
from gateway.responses.body import InputItemBody, ItemBody, ResponseBody
from shared.conversation import ChatMessage

COMPACTION, TRIGGER = "compaction", "compaction_trigger"

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
    """Say whether a request asks for a summary, which its last item does.

    Raises:
        ApiError: 400; the item stands elsewhere, or the response is to be computed in the background.
    """
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
    """Return the body of `POST /v1/responses/compact` as one of `POST /v1/responses` that asks for the same.

    Raises:
        ApiError: 400; it asks for another form of answer than there is.
    """
    for name in ("stream", "background", "store"):
        if getattr(body, name):
            message = f"'{name}' is not supported here: the answer is sent whole, and not stored. Leave it out."
            raise unsupported_parameter(name, message)
    given = body.input
    items = [InputItemBody(type="message", role="user", content=given)] if isinstance(given, str) else given or []
    return replace(body, input=[*items, InputItemBody(type=TRIGGER)], store=False)


def remaining(items: Sequence[ItemBody]) -> list[tuple[int, ItemBody]]:
    """Return what is left of a conversation after its last compaction, each item with its place in the whole."""
    last = max((index for index, item in enumerate(items) if item.type == COMPACTION), default=0)
    return [(index, item) for index, item in enumerate(items) if index >= last or _is_input_message(item)]


def user_messages(items: Sequence[ItemBody]) -> list[ItemBody]:
    """Return the messages of the user in a conversation."""
    return [item for item in items if _is_input_message(item) and item.role == "user"]


def _is_input_message(item: ItemBody) -> bool:
    """Say whether an item is a message to the model, and none of its own."""
    return (item.type or "message") == "message" and item.role != "assistant"
