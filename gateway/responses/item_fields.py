"""Which fields an item of a request may have, by its type: a field of another type would be left out in silence.

Names that no item has are refused where the body is decoded, by the table of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from gateway.api.schemas.refusals import unknown_parameter
from gateway.responses.body import InputItemBody, InputPartBody

_OF_ALL = frozenset({"type", "id", "status"})
_OF_TYPE = MappingProxyType(
    {
        "message": _OF_ALL | {"role", "content"},
        "function_call": _OF_ALL | {"call_id", "name", "namespace", "arguments"},
        # Codex says of its own tools in which namespace they are.
        "function_call_output": _OF_ALL | {"call_id", "name", "namespace", "output"},
        "reasoning": _OF_ALL | {"content", "summary", "encrypted_content"},
        "item_reference": _OF_ALL,
        "compaction": _OF_ALL | {"encrypted_content"},
        "compaction_trigger": _OF_ALL,
    }
)
# Whatever an item of another type holds, it is refused by its type.
_FOREIGN = MappingProxyType(
    {
        kind: tuple(name for name in InputItemBody.__struct_fields__ if name not in names)
        for kind, names in _OF_TYPE.items()
    }
)


def check_item_fields(items: Sequence[InputItemBody]) -> None:
    """Refuse fields that the type of an item does not have.

    Raises:
        ApiError: 400; `param` is the field with its place.
    """
    for index, item in enumerate(items):
        kind = item.type or "message"
        for name in _FOREIGN.get(kind, ()):
            if getattr(item, name) is not None:
                raise unknown_parameter(f"input.[{index}].{name}", f" An item of type '{kind}' has no such field.")
        for list_name in ("content", "output", "summary"):
            parts = getattr(item, list_name)
            if isinstance(parts, list):
                _check_parts(parts, f"input.[{index}].{list_name}")


def _check_parts(parts: Sequence[InputPartBody], where: str) -> None:
    for index, part in enumerate(parts):
        foreign = "text" if part.type == "refusal" else "refusal"
        if getattr(part, foreign) is not None:
            hint = f" A part of type '{part.type[:64]}' has no such field."
            raise unknown_parameter(f"{where}.[{index}].{foreign}", hint)
