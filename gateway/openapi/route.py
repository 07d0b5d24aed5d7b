"""`GET /openapi.json`."""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.openapi.document import document_bytes


@cache
def _content() -> bytes:
    return document_bytes()


async def show_document(request: Request) -> Response:
    """Answer with the document. Everyone may read it: it says nothing of this installation."""
    return Response(_content(), media_type="application/json")


OPENAPI_ROUTE = Route("/openapi.json", show_document, methods=["GET"], name="everyone:/openapi.json")
