from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.process.parent_of_two import ParentOfTwo


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParentOfTwo]:
    parent = ParentOfTwo(monkeypatch)
    yield parent
    monkeypatch.undo()
    parent.close()
