"""What `headrace top` and `usage` make of figures that are there, and of those that are not."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli import top
from ops.cli.running_system import OperatorAccess


def test_worker_that_takes_nothing_is_cordoned_or_draining() -> None:
    assert top._state({"draining": True}) == "cordoned or draining"
    assert top._state({"draining": False}) == ""


@pytest.mark.parametrize(("energy", "shown", "told"), [({}, "-", "null"), ({"energy_mj": 1500}, "1.500", "1500")])
def test_energy_that_no_device_tells_is_a_dash(
    energy: dict[str, int], shown: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operator:
        def call(self, _method: str, _path: str) -> dict[str, Any]:
            return {"use": [{"tenant": "t", "model": "m", "lane": "batch", "requests": 1, **energy}]}

    def find(_access: OperatorAccess) -> Operator:
        return Operator()

    monkeypatch.setattr(top, "find_operator", find)
    table = CliRunner().invoke(top.USAGE, [], catch_exceptions=False)
    assert table.output.splitlines()[1].split()[-2:] == ["0.000", shown]
    line = CliRunner().invoke(top.USAGE, ["--json"], catch_exceptions=False)
    assert line.output.rstrip().endswith(f'"energy_mj": {told}}}')
