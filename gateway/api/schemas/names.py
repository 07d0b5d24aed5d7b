"""The use of each name that a client may write: served, ignored because it changes nothing here, or refused.

The fields of a body are annotated by `described`, which gives the rows of served names. Names that are not served have
rows of their own, beside the body. Each API has a table of its rows in its own room. From the tables come the
decoding of bodies, the description of the API, the page `ops/docs/parameters.md` and the tests. A name that is in no
row is refused too, unless its value is null.

Only where the typed decode of a body has failed, names that change nothing are taken out of it, and whole floats are
written as integers; so a body of served names costs one pass.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.api.schemas.checks import unknown_parameter, unsupported_parameter

# A longer name is not a typing error, and comparing it would cost time.
_MAX_COMPARED_CHARACTERS = 64
# Less likeness than this is chance: `input` is no `min_p`, and `store` no `stream`.
_MIN_LIKENESS = 0.75
_LET_PASS = " Leave it out, or let the operator's `--allow-unknown-parameters` leave out all such names."
_EXAMPLE = "example"
# Names of one thing: an endpoint that has one of them suggests it to clients that write another.
_SAME = (
    ("model", "model_name", "model_id", "engine", "deployment"),
    ("prompt", "input", "inputs", "text", "texts", "content"),
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "max_length", "num_predict"),
    ("system", "instructions", "system_prompt"),
    ("stop", "stop_sequences"),
    ("seed", "random_seed"),
)


class Use(enum.Enum):
    """Served, ignored or refused."""

    SERVED = "served"
    IGNORED = "ignored"
    REFUSED = "refused"


class Kind(enum.Enum):
    """A JSON object that clients write. Each API has its own; the value names it in the documentation."""


@dataclass(frozen=True, slots=True)
class Row:
    """The use of one name.

    Attributes:
        name: As the client writes it.
        kinds: The objects in which it stands.
        note: Served: what it does. Ignored: why it changes nothing. Refused: what to do instead.
        example: A value that a client would send; the tests send it. None for what every body has.
        without_effect: Refused: values that mean the same as leaving it out, and pass. Null always does.
        holds: The kind of object, or of the objects in a list, that is its value.
        use: Served, ignored or refused.
    """

    name: str
    kinds: tuple[Kind, ...]
    note: str
    example: object = None
    without_effect: tuple[object, ...] = ()
    holds: Kind | None = None
    use: Use = field(default=Use.SERVED, kw_only=True)


def ignored(name: str, note: str, example: object, *kinds: Kind) -> Row:
    """Return the row of a name that changes nothing."""
    return Row(name, kinds, note, example, use=Use.IGNORED)


def refused(name: str, instead: str, example: object, without_effect: tuple[object, ...], *kinds: Kind) -> Row:
    """Return the row of a name that would change the answer and is not served."""
    return Row(name, kinds, instead, example, without_effect, use=Use.REFUSED)


def described(note: str, example: object = None) -> Meta:
    """Return the description of a field, which stands behind the type in its `Annotated`.

    Args:
        note: What the parameter does.
        example: A value that a client would send; the tests send it. None for what every body has.
    """
    return Meta(description=note, extra={_EXAMPLE: example})


@dataclass(frozen=True, slots=True)
class OtherTypes:
    """How to read objects of types that clients do not write by themselves.

    Attributes:
        served: The types that clients do write.
        read: Returns the fields to read of an object of another type; its `type` alone makes the reader refuse it.
    """

    served: frozenset[str]
    read: Callable[[Mapping[str, Raw]], dict[str, Raw]] = lambda fields: {"type": fields["type"]}


class ParameterTable:
    """The rows of one API, found by the object they stand in and by name."""

    def __init__(
        self,
        readers: Mapping[Kind, type[Struct]],
        rows: Iterable[Row] = (),
        other_types: Mapping[Kind, OtherTypes] = MappingProxyType({}),
        beside: ParameterTable | None = None,
    ) -> None:
        """Keep the rows that the readers' fields describe, and `rows` about names that are ignored or refused.

        A name may belong to the API of `beside` instead, whose objects may stand in the readers'.

        Raises:
            ValueError: Two rows are about the same name of the same object.
            TypeError: A field is not described.
        """
        self.readers = readers
        self.other_types = other_types
        self._beside = beside
        self._rows: dict[Kind, dict[str, Row]] = {kind: {} for kind in readers}
        inner = {**(beside.readers if beside else {}), **readers}
        kinds = {struct: kind for kind, struct in inner.items()}
        served = [row for kind, struct in readers.items() for row in rows_of(struct, kind, kinds)]
        for row in (*served, *rows):
            for kind in row.kinds:
                if row.name in self._rows[kind]:
                    raise ValueError(f"Two rows are about '{row.name}' of {kind.value}.")
                self._rows[kind][row.name] = row

    def rows(self, kind: Kind) -> dict[str, Row]:
        """Return the rows of one object by name."""
        if kind not in self._rows and self._beside is not None:
            return self._beside.rows(kind)
        return self._rows[kind]

    def hint(self, kind: Kind, name: str) -> str:
        """Return a sentence about an unknown name: which one may be meant, or where it belongs; may be empty."""
        if len(name) > _MAX_COMPARED_CHARACTERS:
            return ""
        served = [row.name for row in self.rows(kind).values() if row.use is Use.SERVED]
        meant = [known for same in _SAME if name in same for known in same if known in served]
        if meant:
            return f" Did you mean '{meant[0]}'?"
        if not _is_endpoint(kind):
            return _nearest(name, served)
        # Another endpoint's name is not a misspelling.
        owners = [self._owner(name), self._beside._owner(name) if self._beside is not None else None]
        owner = next((each for each in owners if each is not None), None)
        return (_nearest(name, served) or _LET_PASS) if owner is None else f" It belongs to {owner.value}."

    def _owner(self, name: str) -> Kind | None:
        for kind, rows in self._rows.items():
            row = rows.get(name)
            if row is not None and row.use is Use.SERVED and _is_endpoint(kind):
                return kind
        return None


def rows_of(
    struct: type[Struct], kind: Kind, kinds: Mapping[type[Struct], Kind] = MappingProxyType({})
) -> tuple[Row, ...]:
    """Return a row for each field of a struct; `kinds` has the structs that may stand in its fields.

    Raises:
        TypeError: A field is not described.
    """
    annotations = get_type_hints(struct, include_extras=True)
    return tuple(_row(struct, name, annotations[name], kind, kinds) for name in struct.__struct_fields__)


def _row(struct: type[Struct], name: str, annotation: Any, kind: Kind, kinds: Mapping[type[Struct], Kind]) -> Row:
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.description is not None:
            example = (meta.extra or {}).get(_EXAMPLE)
            return Row(name, (kind,), meta.description, example, holds=_held(annotation, kinds))
    message = f"{struct.__name__}.{name} says nothing of itself. Annotate it with 'described(...)'."
    raise TypeError(message)


def _held(annotation: Any, kinds: Mapping[type[Struct], Kind]) -> Kind | None:
    if isinstance(annotation, type) and annotation in kinds:
        return kinds[annotation]
    return next((held for part in get_args(annotation) if (held := _held(part, kinds)) is not None), None)


def _is_endpoint(kind: Kind) -> bool:
    return str(kind.value).startswith("POST")


def _nearest(name: str, served: list[str]) -> str:
    spelled = {_letters(known): known for known in served}
    near = difflib.get_close_matches(_letters(name), spelled, n=1, cutoff=_MIN_LIKENESS)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


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
