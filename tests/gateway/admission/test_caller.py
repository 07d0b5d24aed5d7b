"""Recognising a client that returns, by what clients really repeat."""

from __future__ import annotations

import pytest

from gateway.admission.caller import Caller


def caller(key_id: str = "key", body: bytes = b"body", *headers: tuple[bytes, bytes]) -> Caller:
    return Caller(key_id, "tenant", headers, body)


def test_same_key_and_body_are_the_same_client() -> None:
    assert caller().identity == caller("key", b"body", (b"x-stainless-retry-count", b"3")).identity


@pytest.mark.parametrize(("key_id", "body"), [("key2", b"body"), ("key", b"body2"), ("keyb", b"ody")])
def test_another_key_or_body_is_another_client(key_id: str, body: bytes) -> None:
    assert caller(key_id, body).identity != caller().identity


@pytest.mark.parametrize(
    ("value", "is_retry"), [(b"0", False), (b"1", True), (b"10", True), (b"", None), (b"-1", None), (b"\xb2", None)]
)
def test_attempt_counts_of_the_sdks_are_understood(value: bytes, is_retry: bool | None) -> None:
    assert caller("key", b"", (b"x-stainless-retry-count", value)).is_retry is is_retry


def test_client_that_says_nothing_may_be_either() -> None:
    assert (caller().is_retry, caller().ticket) == (None, None)


def test_ticket_is_read_unless_it_is_none_of_ours() -> None:
    assert caller("key", b"", (b"x-headrace-ticket", b"abc")).ticket == "abc"
    assert caller("key", b"", (b"x-headrace-ticket", b"a" * 65)).ticket is None
