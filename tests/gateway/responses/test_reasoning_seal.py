"""Reasoning that clients keep: read by every gateway with the secret, for its own tenant, and only as it was."""

from __future__ import annotations

import base64
from typing import Any, cast

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.secret import Aead

from gateway.admission.auth import Principal
from gateway.api.large_bodies import LargeBodies
from gateway.config import MIN_SECRET_CHARACTERS
from gateway.errors import ApiError
from gateway.responses.body import ItemBody, PartBody
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.reasoning_seal import ReasoningSeals, SealKind, opened
from gateway.responses.store import ResponseStore
from shared.errors import ConfigError
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.responses.conftest import RESPONSES_SECRET, KeyFile

OLD, NEW = "o" * MIN_SECRET_CHARACTERS, "n" * MIN_SECRET_CHARACTERS
SEALS = ReasoningSeals([OLD])
TEXT = "Two and two."


@settings(max_examples=25)
@given(
    tenant=st.text(max_size=20), model=st.text(max_size=20), item_id=st.text(max_size=20), text=st.text(max_size=200)
)
def test_what_was_sealed_is_opened_for_its_tenant_model_and_kind_alone(
    tenant: str, model: str, item_id: str, text: str
) -> None:
    sealed = SEALS.seal(tenant, model, "reasoning", item_id, text)
    assert ReasoningSeals([OLD]).open(tenant, model, "reasoning", sealed) == text
    assert SEALS.open(tenant + "x", model, "reasoning", sealed) is None
    assert SEALS.open(tenant, model + "x", "reasoning", sealed) is None
    assert SEALS.open(tenant, model, "compaction", sealed) is None
    # Where one name ends and the next begins is bound too.
    assert SEALS.open(tenant + model[:1], model[1:], "reasoning", sealed) == (None if model else text)
    assert ReasoningSeals([NEW]).open(tenant, model, "reasoning", sealed) is None
    # Events that are told again are the same; items are not.
    again = SEALS.seal(tenant, model, "reasoning", item_id, text)
    assert again == sealed != SEALS.seal(tenant, model, "reasoning", item_id + "x", text)


def test_no_two_texts_are_encrypted_with_the_same_nonce() -> None:
    items: list[tuple[str, str, SealKind, str, str]] = [
        ("t", "m", "reasoning", "rs_1", TEXT),
        ("t", "m", "reasoning", "rs_1", TEXT + "."),
        ("u", "m", "reasoning", "rs_1", TEXT),
        ("t", "n", "reasoning", "rs_1", TEXT),
        ("t", "m", "compaction", "rs_1", TEXT),
        ("t", "m", "reasoning", "rs_2", TEXT),
    ]
    sealed = [base64.urlsafe_b64decode(SEALS.seal(*item).removeprefix("hr2.")) for item in items]
    assert len({each[: Aead.NONCE_SIZE] for each in sealed}) == len(items)


def test_every_changed_bit_is_noticed() -> None:
    sealed = SEALS.seal("t", "m", "reasoning", "rs_1", TEXT)
    prefix, _, packed = sealed.partition(".")
    content = base64.urlsafe_b64decode(packed)
    assert TEXT.encode() not in content
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        assert SEALS.open("t", "m", "reasoning", f"{prefix}.{base64.urlsafe_b64encode(changed).decode()}") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "hr2.",
        "hr2.!",
        "hr2.AAAA",
        "hr1.AAAA",
        "gAAAAABo",
        SEALS.seal("t", "m", "reasoning", "a", TEXT)[4:],
        # The form of an earlier version.
        SEALS.seal("t", "m", "reasoning", "a", TEXT).replace("hr2.", "hr1."),
        "hr2.ü",
    ],
)
def test_what_is_none_of_ours_is_not_opened(content: str) -> None:
    assert SEALS.open("t", "m", "reasoning", content) is None


def test_secret_is_replaced_without_losing_what_the_old_one_sealed() -> None:
    both = ReasoningSeals.read(f"{NEW}, {OLD}")
    assert both is not None
    assert both.open("t", "m", "reasoning", SEALS.seal("t", "m", "reasoning", "a", TEXT)) == TEXT
    assert ReasoningSeals([NEW]).open("t", "m", "reasoning", both.seal("t", "m", "reasoning", "a", TEXT)) == TEXT


def test_short_secret_is_refused_and_none_seals_nothing() -> None:
    assert ReasoningSeals.read(None) is ReasoningSeals.read("") is None
    with pytest.raises(ConfigError, match=f"HEADRACE_RESPONSES_SECRET: .*fewer than {MIN_SECRET_CHARACTERS}"):
        ReasoningSeals.read(f"{NEW},short")


def test_items_are_opened_and_the_one_at_fault_is_named() -> None:
    message = ItemBody(type="message", role="user", content="hi")
    sealed = ItemBody(type="reasoning", summary=[], encrypted_content=SEALS.seal("t", "m", "reasoning", "a", TEXT))
    assert opened([message, sealed], "input", "reasoning", "t", "m", SEALS) == [
        message,
        ItemBody(type="reasoning", summary=[], content=[PartBody(type="reasoning_text", text=TEXT)]),
    ]
    for tenant, model, seals in (("other", "m", SEALS), ("t", "other", SEALS), ("t", "m", None)):
        with pytest.raises(ApiError, match="could not be verified") as refusal:
            opened([message, sealed], "input", "reasoning", tenant, model, seals)
        error = refusal.value
        assert (error.status, error.code) == (400, "invalid_encrypted_content")
        assert error.param == "input.[1].encrypted_content"


@pytest.mark.parametrize("content", ["", "x"])
def test_content_that_is_nothing_is_refused_as_any_other_and_null_is_left_out(content: str) -> None:
    item = ItemBody(type="reasoning", summary=[], encrypted_content=content)
    with pytest.raises(ApiError, match=f"content '{content}") as refusal:
        opened([item], "input", "reasoning", "t", "m", SEALS)
    assert refusal.value.param == "input.[0].encrypted_content"
    nothing = ItemBody(type="reasoning", summary=[])
    assert opened([nothing], "input", "reasoning", "t", "m", SEALS) == [nothing]


async def test_item_of_another_tenant_is_refused(gateway: GatewayProcess, key_file: KeyFile) -> None:
    sealed = ReasoningSeals([RESPONSES_SECRET]).seal("acme", "none", "reasoning", "rs_1", TEXT)
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    codes = []
    for key in (key_file.keys["acme"], key_file.keys["evil"]):
        async with httpx2.AsyncClient(base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}) as client:
            answer = await client.post("/v1/responses", json={"model": "none", "input": [item]})
            codes.append(answer.json()["error"]["code"])
    # The first one is only not computed: there is no such model.
    assert codes[0] in ("model_not_found", "no_worker")
    assert codes[1] == "invalid_encrypted_content"


async def test_without_a_secret_the_operator_s_setting_is_named() -> None:
    body = b'{"model":"m","input":"x","include":["reasoning.encrypted_content"]}'
    principal, nothing = Principal("key", "tenant"), cast("Any", None)
    with pytest.raises(ApiError, match="HEADRACE_RESPONSES_SECRET") as refusal:
        await ResponsesEndpoint(ResponseStore(nothing, nothing), LargeBodies()).generation(body, principal)
    error = refusal.value
    assert (error.status, error.param, error.code) == (400, "include", "unsupported_parameter")
    endpoint = ResponsesEndpoint(ResponseStore(nothing, nothing, SEALS), LargeBodies())
    generation = await endpoint.generation(body, principal)
    assert generation.draft.has_encrypted_reasoning
