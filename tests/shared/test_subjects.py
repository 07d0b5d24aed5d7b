from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidNameError
from shared.subjects import (
    dead_letter_filter,
    dead_letter_subject,
    decode_name,
    encode_name,
    frame_subject,
    is_batch_reply,
    reply_prefix,
    request_subject,
    result_subject,
    worker_subject,
)

_names = st.text(min_size=1, max_size=30).filter(
    lambda name: "\x00" not in name and not any(0xD800 <= ord(char) < 0xE000 for char in name)
)


@given(_names)
def test_any_name_becomes_one_harmless_token_and_comes_back(name: str) -> None:
    token = encode_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", token)
    assert decode_name(token) == name


@given(_names, _names)
def test_different_names_have_different_tokens(first: str, second: str) -> None:
    assert (encode_name(first) == encode_name(second)) == (first == second)


@pytest.mark.parametrize("name", ["", "a\x00b", "\ud800", "x" * 129, "é" * 65])
def test_unusable_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        encode_name(name)


@pytest.mark.parametrize(
    "token", ["_74_31", "t_31", "_5F", "a.b", "_ff", "_c3", "_00", "", "a b", "_2d", "x" * 129, "é"]
)
def test_token_that_is_no_name_s_encoding_is_refused(token: str) -> None:
    with pytest.raises(InvalidNameError):
        decode_name(token)


@given(st.text(alphabet="_0123456789abcdefABCDEFtxyz-.", max_size=12))
def test_a_name_has_one_encoding(token: str) -> None:
    try:
        name = decode_name(token)
    except InvalidNameError:
        return
    assert encode_name(name) == token


@pytest.mark.parametrize("subject", ["hr.reply.a_20b.x", "hr.reply.a_20b.x.y-1._z"])
def test_batch_job_may_name_a_reply_of_its_tenant(subject: str) -> None:
    assert is_batch_reply(subject, "a b")


@pytest.mark.parametrize(
    "subject",
    [
        "", "hr.reply.a_20b", "hr.reply.a_20b.", "hr.reply.other.x", "hr.reply.a_20b.*", "hr.reply.a_20b.>",
        "hr.reply.a_20b.x..y", "hr.reply.a_20b.x y", "hr.reply.a_20b.x\r\nPUB hr.cancel.m 0", "hr.reply.a_20b.x\n",
        "$JS.ACK.x", "_INBOX.x", "_INBOX_worker.x", "hr.cancel.m", "hr.reply.a_20b." + ".".join("x" * 17),
    ],
)  # fmt: skip
def test_batch_job_may_name_no_other_reply(subject: str) -> None:
    assert not is_batch_reply(subject, "a b")


def test_metacharacters_in_names_do_not_reach_other_subjects() -> None:
    assert request_subject("a.*", "batch", ">") == "hr.req.a_2e_2a.batch._3e"
    assert request_subject("m", "interactive", "t") == "hr.req.m.interactive"
    assert frame_subject("g 1") == "hr.tok.g_201"
    assert worker_subject("m", "w.1") == "hr.worker.m.w_2e1"
    assert result_subject("t", "id_1") == "hr.result.t.id_5f1"


def test_filter_of_dead_letters_matches_its_subjects() -> None:
    tokens = dead_letter_subject("m/1", "batch", "t*").split(".")
    assert dead_letter_filter().split(".") == ["hr", "dead", "*", "*", "*"]
    assert dead_letter_filter("m/1").split(".") == [*tokens[:3], "*", "*"]
    assert dead_letter_filter(lane="batch").split(".") == ["hr", "dead", "*", "batch", "*"]
    assert dead_letter_filter("m/1", "batch", "t*").split(".") == tokens


def test_reply_of_a_batch_job_may_have_sixteen_tokens_of_its_own() -> None:
    tenant = "a long name of sixty-four characters, as long as one may be " + "x" * 4
    assert is_batch_reply(reply_prefix(tenant) + ".".join(["a"] * 16), tenant)
    assert not is_batch_reply(reply_prefix(tenant) + ".".join(["a"] * 17), tenant)
