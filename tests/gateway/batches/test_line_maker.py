"""Lines are made as their model computes them, or only as their results are read."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from gateway.batches.line_maker import LineMaker, NotReadyError
from gateway.generation import Generation, Prompt
from shared.adapter_names import NamedAdapter
from shared.adapter_store import AdapterContent
from shared.errors import BadRequestError
from shared.sampling import Sampling
from tests.gateway.fleet.test_fleet import Watched


def test_line_whose_adapter_was_removed_is_answered_and_one_whose_workers_are_away_waits() -> None:
    watched = Watched()
    watched.fleet.sweep(watched.now)
    watched.hear()
    names = watched.fleet.named_adapters
    services = Mock(settled=lambda generation, tenant: generation, fleet=watched.fleet)
    maker = LineMaker(cast("Any", services), cast("Any", Mock(tenant="acme")))
    line = Generation("completion", "a", (Prompt(1, text="a"),), 1, Sampling(), deterministic=True)
    names.note(NamedAdapter("a", "acme", "m", AdapterContent("1" * 64, 8)))
    with pytest.raises(NotReadyError, match="can serve the adapter `a` at the moment"):
        maker._settled(line)
    names.note(NamedAdapter("a", "acme", "m", None))
    with pytest.raises(BadRequestError, match="The adapter 'a' was removed"):
        maker._settled(line)
