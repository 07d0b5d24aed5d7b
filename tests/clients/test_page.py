"""The page of the clients never shows less than what was tried."""

from __future__ import annotations

from tests.clients.test_clients import cells_of, page, read_cells

KNOWN = {"a (Python)": {"chat": "", "batches": ""}, "b": {"chat": ""}}


def test_page_that_is_read_says_what_was_written() -> None:
    cells = {"a (Python)": {"chat": "", "batches": "TypeError: no"}, "b": {"chat": ""}}
    assert read_cells(page(cells)) == cells


def test_client_that_did_not_run_shows_as_failed_cells() -> None:
    cells = KNOWN | {"a (Python)": cells_of(KNOWN["a (Python)"], {}, has_ended=False)}
    text = page(cells)
    assert "1 of 3 cells work." in text
    assert "| batches | no |  |" in text
    assert "- a (Python), chat: Not reached" in text
    assert list(cells_of([], {}, has_ended=False)) == list(cells_of([], {}, has_ended=True)) == ["start"]


def test_client_that_broke_off_shows_what_it_has_not_reached() -> None:
    known = ["chat", "batches"]
    assert [bool(why) for why in cells_of(known, {"chat": ""}, has_ended=False).values()] == [False, True]
    # A feature that its script no longer has is gone.
    assert cells_of(known, {"chat": ""}, has_ended=True) == {"chat": ""}
