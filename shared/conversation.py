"""A conversation as it travels: messages, the tools that were called in it, and what the chat template gets besides."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Annotated

from msgspec import Meta, Struct

from shared.bounds import MAX_IMAGES, MAX_MESSAGES, MAX_TOOLS, NumTokens
from shared.media import ContentImage


class ToolCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a tool that the assistant has made. `arguments` is JSON text, as the model wrote it."""

    id: Annotated[str, Meta(max_length=256)]
    name: Annotated[str, Meta(max_length=256)]
    arguments: str


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, its content already flattened to text.

    Attributes:
        part_lengths: Characters of the texts that the content consists of, where the client wrote it as a list: some
            templates treat each. The last one takes the rest.
        reasoning: What the assistant thought before it answered.
        tool_calls: Calls that the assistant has made.
        tool_call_id: The call whose result this message is.
        images: The images in the content, in their order.
    """

    role: Annotated[str, Meta(max_length=64)]
    content: str
    name: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_TOOLS)] = ()
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    part_lengths: Annotated[tuple[NumTokens, ...], Meta(max_length=MAX_MESSAGES)] = ()
    images: Annotated[tuple[ContentImage, ...], Meta(max_length=MAX_IMAGES)] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts that the content consists of; empty where it is one text."""
        ends = list(accumulate(self.part_lengths))
        if not ends:
            return ()
        return tuple(self.content[begin:end] for begin, end in pairwise((0, *ends[:-1], len(self.content))))

    @property
    def texts_and_images(self) -> tuple[str | int, ...]:
        """The content's parts in their order: texts, and the indices of images among the request's media."""
        texts = self.parts or ((self.content,) if self.content else ())
        found: list[str | int] = []
        images = sorted(self.images, key=lambda image: image.num_parts_before)
        for number in range(len(texts) + 1):
            while images and (images[0].num_parts_before <= number or number == len(texts)):
                found.append(images.pop(0).index)
            found += texts[number : number + 1]
        return tuple(found)


class ChatOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chat template gets besides the messages.

    Attributes:
        tools: JSON text of the list of tools, in OpenAI's form; None without tools.
        variables: JSON text of an object of more variables of the template (`chat_template_kwargs`).
        add_generation_prompt: End with the opening of the assistant's turn.
        continue_final_message: The last message is the beginning of the answer: leave its turn open.
        template: A template to use instead of the model's own; only where the operator allows it.
    """

    tools: str | None = None
    variables: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None


Messages = Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_MESSAGES)]


class Conversation(Struct, frozen=True):
    """Everything that a chat template makes a prompt of."""

    messages: Messages
    options: ChatOptions = ChatOptions()

    @property
    def num_characters(self) -> int:
        """Length of all its texts."""
        options = self.options
        own = len(options.tools or "") + len(options.variables or "") + len(options.template or "")
        return own + sum(map(_num_characters, self.messages))

    @property
    def num_pieces(self) -> int:
        """Return how many messages, parts, calls and images a template may go through, whatever is in them."""
        own = (len(each.part_lengths) + len(each.tool_calls) + len(each.images) for each in self.messages)
        return len(self.messages) + sum(own)


def _num_characters(message: ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    names = len(message.role) + len(message.name or "") + len(message.tool_call_id or "")
    return len(message.content) + len(message.reasoning or "") + calls + names
