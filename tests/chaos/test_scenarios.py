"""Scenarios of `make chaos`, short, one test each."""

from __future__ import annotations

import pytest

from tests.chaos.harness.scenarios import SCENARIOS

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", SCENARIOS)
async def test_scenario_keeps_its_promise(name: str) -> None:
    outcome = await SCENARIOS[name](200)
    assert outcome.problems == []
