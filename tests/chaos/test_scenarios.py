"""Scenarios of `make chaos`, short, one test each."""

from __future__ import annotations

import pytest

from ops.chaos.outcome import NotPossibleHereError
from ops.chaos.scenarios import SCENARIOS

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]


# Each of its streams meets three deaths of all workers: more of them take minutes more.
NUM_REQUESTS = {"three-deaths": 8}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_scenario_keeps_its_promise(name: str) -> None:
    try:
        outcome = await SCENARIOS[name](NUM_REQUESTS.get(name, 200))
    except NotPossibleHereError as error:
        pytest.skip(str(error))
    assert outcome.problems == []
