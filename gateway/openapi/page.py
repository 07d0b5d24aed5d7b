"""The page `ops/docs/api.md`, made of the description: `python -m gateway.openapi.page > ops/docs/api.md`."""

from __future__ import annotations

import sys
from typing import Any

from gateway.openapi.document import document

_OPENING = """# The API

What a gateway answers, path by path. For programs the same is [openapi.json](openapi.json), which a gateway serves at
`/openapi.json`. What becomes of each parameter of a body is in [parameters.md](parameters.md), what each error means in
[errors.md](errors.md).

`/v1` may be left out of a path, and a slash may stand at its end. A key is shown as `Authorization: Bearer <key>` or as
`x-api-key: <key>`; what everyone may ask is marked so.

**A stream that survives its gateway.** `stream_options: {"resumable": true}` in `/v1/chat/completions`,
`/v1/completions` and `/v1/messages` gives every event an `id`, counted from 0; the first one comes before
any token. `GET /v1/streams/{id}`, whose id is the answer's `x-request-id`, tells the events again from any gateway,
with the same bytes: all of them, those after `Last-Event-ID: n` (which `EventSource` sends by itself), or those from
`?from=n` on. A browser's own `EventSource` sends no key: use a library with its interface that takes headers, as
`eventsource` for Node. Who has them all gets a 204. Several clients may read one stream. An error without an `id` is
about the connection alone. The generation goes on without a client for the operator's grace period (60 s) and is then
cancelled; `DELETE` stops it at once; `GET /v1/streams` lists the running ones of the key, with `has_more` where its
tenant has more than 1,000. A stream is kept for the operator's time (600 s) after its
end. A call counts as one read of the key, or as one for each 64 kB that its gateway has to read from the log. A
background response (`/v1/responses` with `background`) is read, resumed and deleted here as well, by the id of the
response.

**Repeated requests.** An `Idempotency-Key` (1 to 255 visible ASCII characters) in a POST to one of these, streamed or
not, lets a repeated POST have the same generation: it joins a running one, and gets the answer of an ended one again,
with `idempotent-replayed: true`. OpenAI's and Anthropic's libraries send it as `extra_headers` (Python) or `headers`
(Node); Node's option `idempotencyKey` sends nothing. Keys belong to a tenant and an endpoint. The same key with another
body is a 422. An answer that failed is not kept. Elsewhere, as in `/v1/responses` and `/v1/embeddings`, the header
changes nothing.
"""

_ENDING = "This page is made from the description: `python -m gateway.openapi.page > ops/docs/api.md`.\n"

Json = dict[str, Any]


def api_page() -> str:
    """Return the page, in Markdown."""
    described = document()
    schemas = described["components"]["schemas"]
    operations = [
        _operation(method, path, operation, schemas)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    return "\n".join([_OPENING, *operations, *_types(schemas, "\n".join(operations)), _ENDING])


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    who = "" if operation["security"] else " For everyone."
    lines = [f"## {method.upper()} {path}", operation["summary"] + who]
    body = operation.get("requestBody")
    if body is not None:
        schema = schemas[_name(body["content"]["application/json"]["schema"])]
        required = schema.get("required", [])
        fields = schema["properties"].items()
        rest = [name for name, field in fields if name not in required and not _is_ignored(field)]
        lines.append(f"Body: {_names(required) or 'nothing'} required; {_names(rest) or 'nothing'} optional.")
    content = operation["responses"]["200"]["content"]
    shown = [
        _shown(each["schema"]) if "schema" in each else f"`{kind}`"
        for kind, each in content.items()
        if kind != "text/event-stream"
    ]
    if shown:
        lines.append(f"Answer: {shown[0]}.")
    if "text/event-stream" in content:
        lines.append(f"Each event of a stream: {_link(content['text/event-stream']['schema'])}.")
    return "\n\n".join(lines) + "\n"


def _is_ignored(field: Json) -> bool:
    return str(field.get("description", "")).startswith("Ignored:")


def _types(schemas: Json, used: str) -> list[str]:
    names = [name for name in schemas if f"(#{name.lower()})" in used]
    sections: dict[str, str] = {}
    while names:
        name = names.pop(0)
        if name not in sections:
            sections[name] = _type(name, schemas[name])
            names += [other for other in schemas if f"(#{other.lower()})" in sections[name]]
    return ["# Responses\n", *(sections[name] for name in sorted(sections))]


def _type(name: str, schema: Json) -> str:
    fields = schema.get("properties", {})
    rows = [f"| `{field}` | {_shown(described)} |" for field, described in fields.items()]
    return "\n".join([f"## {name}\n", schema.get("description", ""), "", "| field | type |", "|---|---|", *rows, ""])


def _shown(schema: Json) -> str:
    if "$ref" in schema:
        return _link(schema)
    if "anyOf" in schema:
        return " or ".join(map(_shown, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_shown(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _link(schema: Json) -> str:
    name = _name(schema)
    return f"[{name}](#{name.lower()})"


def _name(schema: Json) -> str:
    reference: str = schema["$ref"]
    return reference.rpartition("/")[2]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(api_page())
