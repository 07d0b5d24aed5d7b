"""Builds the OpenAPI document, and serves it: `python -m gateway.openapi.document > ops/docs/openapi.json`.

Each API describes its own routes and the names in its bodies.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.anthropic import message as anthropic
from gateway.anthropic.names import ANTHROPIC_NAMES
from gateway.api import chat_answers as chat
from gateway.api import routes as shared
from gateway.api.operation import Operation
from gateway.api.schemas.bodies import OPENAI_NAMES
from gateway.api.schemas.names import Use
from gateway.batches import record as batches
from gateway.files import objects as files
from gateway.pooling import answers as pooling
from gateway.pooling.bodies import POOLED_NAMES
from gateway.responses import draft as responses
from gateway.responses.names import RESPONSE_NAMES
from gateway.resumable import routes as resumable
from gateway.usage import routes as usage

# What becomes of the names in the bodies of each API.
TABLES = (OPENAI_NAMES, RESPONSE_NAMES, POOLED_NAMES, ANTHROPIC_NAMES)


OPERATIONS = (
    *chat.OPERATIONS,
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *pooling.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
    *resumable.OPERATIONS,
    *shared.OPERATIONS,
    *usage.OPERATIONS,
)


_TITLE = "Headrace"
_DESCRIPTION = """The public port of a gateway. Errors have the same four keys everywhere; 429 and 503 say in
`Retry-After` when to come back. `/v1` may be left out of paths. `ops/docs/parameters.md` says of each parameter what
becomes of it."""
_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)\}")

Json = dict[str, Any]


def document() -> Json:
    """Return the whole document."""
    described = [struct for table in TABLES for struct in table.readers.values()]
    told = [each for op in OPERATIONS for each in (op.body, op.answer, op.event, op.error) if each is not None]
    types = list(dict.fromkeys([*described, *told]))
    references, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas = dict(zip(types, references, strict=True))
    for component in components.values():
        if "description" in component:
            # msgspec before 0.23 leaves the indentation of a docstring.
            component["description"] = inspect.cleandoc(component["description"])
    _describe_parameters(schemas, components)
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": _TITLE, "version": "1", "description": " ".join(_DESCRIPTION.split())},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def document_bytes() -> bytes:
    """Return the document as JSON for people and programs."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1) + b"\n"


def _describe_parameters(schemas: dict[Any, Json], components: Json) -> None:
    described = [(struct, table.rows(kind)) for table in TABLES for kind, struct in table.readers.items()]
    for struct, rows in described:
        schema = components[schemas[struct]["$ref"].rpartition("/")[2]]
        for name, row in rows.items():
            if row.use is Use.SERVED:
                field = schema["properties"][name]
                # Beside a reference a description is allowed since 3.1.
                schema["properties"][name] = {"description": row.note} | field
            elif row.use is Use.IGNORED:
                schema["properties"][name] = {"description": f"Ignored: {row.note}"}


def _operation(operation: Operation, schemas: dict[Any, Json]) -> Json:
    content: Json = {}
    words = re.sub(r"[^a-z]+", "_", operation.path.removeprefix("/v1")).strip("_")
    if operation.answer is not None:
        is_json = operation.media_type == "application/json"
        content[operation.media_type] = {"schema": schemas[operation.answer]} if is_json else {}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schemas[operation.event]}
    error = {"description": "An error.", "content": {"application/json": {"schema": schemas[operation.error]}}}
    described: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{words}",
        "security": [{"bearer": []}, {"key": []}] if operation.has_key else [],
        "responses": {
            "200": {"description": _first_line(operation.answer or operation.event), "content": content},
            "default": error,
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.body]}},
        }
    names = _PATH_PARAMETER.findall(operation.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described


def _first_line(answer: Any) -> str:
    struct = next(iter(get_args(answer)), answer)
    return (inspect.getdoc(struct) or "").partition("\n")[0]


@cache
def _content() -> bytes:
    return document_bytes()


async def show_document(request: Request) -> Response:
    """Answer with the document. Everyone may read it: it says nothing of this installation."""
    return Response(_content(), media_type="application/json")


OPENAPI_ROUTE = Route("/openapi.json", show_document, methods=["GET"], name="everyone:/openapi.json")


if __name__ == "__main__":
    sys.stdout.write(document_bytes().decode())
