"""Which formats of strings a JSON schema may name, and what becomes of each.

JSON Schema defines some names, and a validator may hold a text to these: such a format is enforced, or the schema is
refused. Every other name is a note that no validator looks at (OpenAPI's `int32` and `binary`, Zod's `cuid2` and
`emoji`), so that whatever the rest of the schema allows keeps to it.

Source: JSON Schema 2020-12, Validation, 7.1 to 7.3, and its earlier drafts.
"""

from __future__ import annotations

_DEFINED = frozenset(
    {
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "iri",
        "iri-reference",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
        "regex",
        # Of the third draft.
        "color",
        "host-name",
        "ip-address",
        "phone",
        "style",
        "utc-millisec",
    }
)


def is_note(name: str) -> bool:
    """Say whether a format says nothing that a validator holds a text to."""
    return name not in _DEFINED
