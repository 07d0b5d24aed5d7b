"""Take out of a body the names that change nothing, and write whole floats as integers, for its typed decode.

It runs only where the typed decode of a body has failed, so that a body of served names costs one pass.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct

from gateway.api.schemas.checks import unknown_parameter, unsupported_parameter
from gateway.api.schemas.names import Kind, ParameterTable, Row, Use

# More names and objects than these are not looked at one by one: each costs some 150 bytes.
_MAX_NAMES = 1 << 17
_MAX_COMPARED_BYTES = 256
# Every whole number up to here is a float.
_MAX_WHOLE = 2.0**53


class BodyRules(Struct, frozen=True):
    """What bodies may have beyond the table of parameters.

    Attributes:
        allow_unknown: Names that the table does not have are left out instead of refused.
        only_model: Returns the model of a body that names none, or None where several could be meant. Large bodies are
            read in a thread, which calls it.
        model: Takes the place of the model that the body names: the path names one.
    """

    allow_unknown: bool = False
    only_model: Callable[[], str | None] = lambda: None
    model: str | None = None


STRICT = BodyRules()
_NULL = Raw(b"null")

_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[dict[str, Raw]])


def without_ignored(body: bytes, table: ParameterTable, kind: Kind, rules: BodyRules) -> bytes:
    """Return a body without the names that change nothing, and with whole numbers written as such.

    JSON of something else than an object is returned as it is.

    Raises:
        ApiError: 400, naming the first name that is unknown or not served.
        msgspec.DecodeError: It is no JSON.
    """
    if body.count(b":") + body.count(b"{") > _MAX_NAMES:
        return body
    return bytes(_Bodies(table, rules).value(Raw(body), kind, ""))


class _Bodies:
    def __init__(self, table: ParameterTable, rules: BodyRules) -> None:
        self._table = table
        self._rules = rules

    def value(self, raw: Raw, kind: Kind, path: str) -> Raw:
        try:
            if bytes(memoryview(raw)[:1]) == b"[":
                fields = [self._fields(each, kind, f"{path}.[{i}]") for i, each in enumerate(_list_decoder.decode(raw))]
                return Raw(msgspec.json.encode(fields))
            return Raw(msgspec.json.encode(self._fields(_object_decoder.decode(raw), kind, path)))
        except msgspec.ValidationError:
            # Of another type: the typed decode refuses it.
            return raw

    def _fields(self, fields: dict[str, Raw], kind: Kind, path: str) -> dict[str, Raw]:
        rows = self._table.rows(kind)
        others = self._table.other_types.get(kind)
        if others is not None and _is_of_other_type(fields, others.served):
            return {
                name: self._held(raw, rows.get(name), f"{path}.{name}") for name, raw in others.read(fields).items()
            }
        kept: dict[str, Raw] = {}
        for name, raw in fields.items():
            where = f"{path}.{name}" if path else name
            row = rows.get(name)
            if row is None:
                if not (self._rules.allow_unknown or _is_one_of(raw, ())):
                    raise unknown_parameter(where, self._table.hint(kind, name))
            elif row.use is Use.SERVED:
                kept[name] = self._held(raw, row, where)
            elif row.use is Use.REFUSED and not _is_one_of(raw, row.without_effect):
                raise unsupported_parameter(where, instead=row.note)
        if not path and "model" in rows and _is_one_of(fields.get("model", _NULL), ()):
            self._name_model(kept)
        return kept

    def _name_model(self, kept: dict[str, Raw]) -> None:
        kept.pop("model", None)
        model = self._rules.model or self._rules.only_model()
        if model is not None:
            kept["model"] = Raw(msgspec.json.encode(model))

    def _held(self, raw: Raw, row: Row | None, where: str) -> Raw:
        return _whole(raw) if row is None or row.holds is None else self.value(raw, row.holds, where)


def _is_of_other_type(fields: dict[str, Raw], types: frozenset[str]) -> bool:
    """Whether an object names a type other than these; without a type, the error is about its fields."""
    raw = fields.get("type")
    if raw is None or len(memoryview(raw)) > _MAX_COMPARED_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return isinstance(value, str) and value not in types


def _is_one_of(raw: Raw, values: tuple[object, ...]) -> bool:
    if len(memoryview(raw)) > _MAX_COMPARED_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(type(value) is type(other) and value == other for other in values)


def _whole(raw: Raw) -> Raw:
    view = memoryview(raw)
    if len(view) > _MAX_COMPARED_BYTES or not (0x30 <= view[0] <= 0x39 or view[0] == 0x2D):
        return raw
    number = msgspec.json.decode(raw)
    if type(number) is float and number.is_integer() and abs(number) <= _MAX_WHOLE:
        return Raw(b"%d" % int(number))
    return raw
