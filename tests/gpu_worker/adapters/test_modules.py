"""What names mean while adapters come and go, and whose place is taken."""

from __future__ import annotations

import pytest

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.loaded import LoadedAdapters
from shared.adapter_calls import MAX_ADAPTERS
from shared.errors import BadRequestError

ONE, OTHER, THIRD = "1" * 64, "2" * 64, "3" * 64


def _loaded(num_slots: int, **named: str) -> LoadedAdapters:
    loaded = LoadedAdapters(num_slots)
    for name, digest in named.items():
        slot = loaded.take_slot()
        assert slot is not None
        loaded.add(digest, slot)
        loaded.put(name, digest)
    return loaded


def _meaning(loaded: LoadedAdapters, name: str) -> str:
    found = loaded.find(name)
    assert found is not None
    return found.digest


def test_name_that_is_loaded_again_means_both_until_the_older_goes() -> None:
    loaded = _loaded(2, a=ONE)
    slot = loaded.take_slot()
    assert slot == 1
    loaded.add(OTHER, slot)
    loaded.put("a", OTHER)
    assert [each.digest for each in loaded.all] == [ONE, OTHER]
    assert _meaning(loaded, "a") == OTHER
    loaded.unlist_older("a", OTHER)
    assert [each.digest for each in loaded.all] == [OTHER]
    # Requests that name the content of before are answered as long as it is here.
    assert _meaning(loaded, ONE) == ONE


def test_name_that_goes_back_keeps_what_it_means_now() -> None:
    loaded = _loaded(2, a=ONE, b=OTHER)
    loaded.put("a", OTHER)
    loaded.put("a", ONE)
    loaded.unlist_older("a", OTHER)
    assert _meaning(loaded, "a") == ONE
    loaded.unlist_older("a", ONE)
    assert [each.digest for each in loaded.all if each.name == "a"] == [ONE]


def test_place_is_taken_of_what_has_no_name_and_no_request() -> None:
    loaded = _loaded(2, a=ONE, b=OTHER)
    assert loaded.take_slot() is None
    loaded.unlist("a")
    assert loaded.take_slot({0, None}) is None
    assert loaded.take_slot({1, None}) == 0
    with pytest.raises(BadRequestError):
        loaded.find(ONE)


def test_names_are_bounded() -> None:
    loaded = _loaded(1, a=ONE)
    for number in range(MAX_ADAPTERS - 1):
        loaded.put(f"n{number}", ONE)
    with pytest.raises(AdapterError, match="unload one"):
        loaded.put("one more", ONE)
