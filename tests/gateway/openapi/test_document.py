"""The description of the public port is current, complete, and well formed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from starlette.requests import Request

from gateway.openapi.document import OPERATIONS, document, document_bytes, show_document
from gateway.openapi.page import api_page

FILE = Path(__file__).parents[3] / "ops/docs/openapi.json"
PAGE = FILE.with_name("api.md")
DOCUMENT = document()


def test_file_is_current() -> None:
    assert FILE.read_bytes() == document_bytes(), "run: python -m gateway.openapi.document > ops/docs/openapi.json"


def test_page_is_current_and_its_links_lead_somewhere() -> None:
    page = PAGE.read_text()
    assert page == api_page(), "run: python -m gateway.openapi.page > ops/docs/api.md"
    headings = {line[3:].lower() for line in page.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\(#(\w+)\)", page)) <= headings


def test_every_reference_leads_to_a_schema_and_every_schema_is_one() -> None:
    for reference in re.findall(r'"\$ref":"([^"]*)"', json.dumps(DOCUMENT, separators=(",", ":"))):
        name = reference.removeprefix("#/components/schemas/")
        assert name in DOCUMENT["components"]["schemas"]
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_operations_have_names_of_their_own() -> None:
    names = [method["operationId"] for path in DOCUMENT["paths"].values() for method in path.values()]
    assert len(set(names)) == len(names) == len(OPERATIONS)


@pytest.mark.parametrize("name", ["temperature", "store", "messages"])
def test_parameter_is_described_as_in_the_table(name: str) -> None:
    field = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"][name]
    assert field["description"].endswith(".")
    assert field["description"].startswith("Ignored") is (name == "store")


async def test_document_is_answered_as_it_is_in_the_repository() -> None:
    response = await show_document(Request({"type": "http"}))
    assert (response.status_code, response.media_type, response.body) == (200, "application/json", document_bytes())
