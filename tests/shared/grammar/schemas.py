"""Random JSON schemas, and random documents that a compiled grammar lets through."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from llguidance import LLMatcher

from shared.grammar import parser_limits
from tests.shared.grammar.byte_matcher import END, byte_tokenizer

MAX_BYTES = 600
# Rather these, so that documents end, and escapes are tried.
_PREFERRED = [END, *map(ord, '"}]\\')]

_integers = st.integers(-50, 50)
_patterns = st.sampled_from(["^[a-z]*$", '^[^"]+$', r"^\d{2,3}$", "^(ab|c)+$", r"^[^\\a]{0,5}$", "x", r"^\S+$"])
_values = st.one_of(st.none(), st.booleans(), _integers, st.text("abc", max_size=3))


def _fields(name: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=optional)


_leaves = st.one_of(
    _fields("integer", minimum=_integers, maximum=_integers, multipleOf=st.integers(1, 9)),
    _fields("number", minimum=_integers, exclusiveMaximum=_integers),
    _fields("string", minLength=st.integers(0, 4), maxLength=st.integers(0, 9), pattern=_patterns),
    st.fixed_dictionaries({"enum": st.lists(_values, min_size=1, max_size=5)}),
    st.fixed_dictionaries({"const": _values}),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "string", "format": "date"}, {}]),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from("abcd")
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _fields(
            "object",
            properties=st.dictionaries(names, inner, max_size=4),
            required=st.lists(names, unique=True, max_size=2),
            additionalProperties=st.one_of(st.booleans(), inner),
        ),
        _fields("array", items=inner, minItems=st.integers(0, 2), maxItems=st.integers(0, 4)),
        _fields("array", prefixItems=some, items=st.one_of(st.just(False), inner)),
        st.fixed_dictionaries({"anyOf": some}),
        st.fixed_dictionaries({"oneOf": some}),
        st.fixed_dictionaries({"allOf": some}),
        st.fixed_dictionaries({"type": st.sampled_from(["object", "array"]), "not": inner}),
    )


schemas = st.recursive(_leaves, _larger, max_leaves=8)


def written_document(grammar: str, chance: random.Random) -> str | None:
    """Return a text that the grammar lets a model write, byte by byte; None if it does not end soon."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
    written = bytearray()
    while len(written) < MAX_BYTES:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(END + 1) if mask >> token & 1]
        preferred = [token for token in _PREFERRED if token in allowed]
        token = chance.choice(preferred if preferred and chance.random() < 0.5 else allowed)
        if token == END:
            return written.decode()
        written.append(token)
        assert matcher.consume_token(token)
    return None
