"""Which fields a block of a message may have, by its type: a field of another type would be left out in silence.

Names that no block has are refused where the body is decoded, by the table of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from msgspec import Raw, UnsetType

from gateway.anthropic.body import BlockBody, PromptBody, SourceBody
from gateway.anthropic.hosted_blocks import HOSTED_CALLS, HOSTED_RESULTS
from gateway.api.schemas.refusals import unknown_parameter
from gateway.api.schemas.texts import given

_OF_TYPE = MappingProxyType(
    {
        "text": {"text"},
        "thinking": {"thinking"},
        "redacted_thinking": set[str](),
        "tool_use": {"id", "name", "input"},
        "tool_result": {"tool_use_id", "content", "is_error"},
        "document": {"source", "title", "context"},
        "search_result": {"source", "title", "content"},
        **{kind: {"id", "name", "input"} for kind in HOSTED_CALLS},
        **{kind: {"tool_use_id", "content", "is_error"} for kind in HOSTED_RESULTS},
    }
)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """The fields that blocks of a type do not have. All are read at once: a body may hold a hundred thousand blocks."""

    names: tuple[str, ...]
    values: Callable[[BlockBody], tuple[object, ...]]
    absent: tuple[object, ...]


def _foreign(own: set[str]) -> _Foreign:
    names = tuple(name for name in BlockBody.__struct_fields__ if name not in own | {"type"})
    values = attrgetter(*names)
    return _Foreign(names, values, values(BlockBody(type="")))


# Whatever a block of another type holds, it is refused by its type.
_FOREIGN = MappingProxyType({kind: _foreign(own) for kind, own in _OF_TYPE.items()})

# The result of a tool holds a document, which holds text. Whatever lies deeper is refused by its type.
_MAX_DEPTH = 3


def check_block_fields(body: PromptBody) -> None:
    """Refuse fields that the type of a block does not have.

    Raises:
        ApiError: 400; `param` is the field with its place.
    """
    if isinstance(body.system, list):
        _check(body.system, "system")
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            _check(message.content, f"messages.[{index}].content")


def _check(blocks: Sequence[BlockBody], where: str, depth: int = 1) -> None:
    if depth > _MAX_DEPTH:
        return
    for index, block in enumerate(blocks):
        foreign = _FOREIGN.get(block.type)
        if foreign is not None and foreign.values(block) != foreign.absent:
            _refuse_given(block, foreign.names, f"{where}.[{index}]")
        if isinstance(block.content, list):
            _check(block.content, f"{where}.[{index}].content", depth + 1)
        if isinstance(block.source, SourceBody) and isinstance(block.source.content, list):
            _check(block.source.content, f"{where}.[{index}].source.content", depth + 1)


def _refuse_given(block: BlockBody, names: Sequence[str], place: str) -> None:
    for name in names:
        if _is_given(getattr(block, name)):
            raise unknown_parameter(f"{place}.{name}", f" A block of type '{block.type}' has no such field.")


def _is_given(value: object) -> bool:
    return (given(value) if isinstance(value, Raw | UnsetType) else value) is not None
