"""`headrace model`, without a system and beside one that is played."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli import model
from ops.cli.model import hosted_table

MODEL = {"name": "m", "state": "asleep", "num_ready": 0, "on_demand": True, "ready_in_s": 9.1, "need_bytes": 0}
MODEL |= {"load_s": None, "error": None}


class Operator:
    """Takes orders, and tells of a model that is in these states, one after the other."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states)
        self.orders: list[dict[str, Any] | None] = []

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if method == "POST":
            self.orders.append(body)
            return {"host": "h", "name": "m"}
        state = self.states.pop(0) if self.states else None
        if state is None:
            raise KeyboardInterrupt
        return {"hosts": [{"host": "h", "models": [MODEL | state]}]}


def run(monkeypatch: pytest.MonkeyPatch, operator: Operator, *words: str) -> Any:
    monkeypatch.setattr(model, "find_operator", lambda _: operator)
    monkeypatch.setattr(model, "_POLL_S", 0.0)
    return CliRunner().invoke(model.command, words)


@pytest.mark.parametrize("name", list(model.command.commands))
def test_help_needs_no_system(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(model.command, [name, "--help"])
    assert (shown.exit_code, "Usage:" in shown.output) == (0, True)


def test_only_what_is_given_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    words = ("replace", "m", "new", "--no-wait")
    assert run(monkeypatch, operator, *words).exit_code == 0
    assert run(monkeypatch, operator, *words, "--memory-bytes", "100GB", "--always").exit_code == 0
    plain = {"name": "m", "path": "new", "options": {}}
    assert operator.orders == [plain, plain | {"memory_bytes": 100_000_000_000, "on_demand": False}]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory-bytes", "much"), "such as 24GB"),
        (("--memory-bytes", "0"), "at least 1"),
        (("--idle-s", "5"), "sleep"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_ordered(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Operator()
    refused = run(monkeypatch, operator, "load", "m", "new", *words)
    assert (refused.exit_code, told in refused.output, operator.orders) == (2, True, [])


def test_waiting_for_room_and_an_interrupt_have_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = {"state": "no_room"}
    stopped = run(monkeypatch, Operator(no_room, no_room), "load", "m", "new")
    assert stopped.output.count("waits for room") == 1
    assert "the order goes on; `headrace model unload m` takes it back" in stopped.output


def test_failed_load_says_how_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run(monkeypatch, Operator({"state": "failed", "error": "no tokenizer"}), "load", "m", "new")
    assert "no tokenizer; it is tried again every minute until `headrace model unload m`" in str(failed.exception)


def test_table_tells_no_guess_as_a_measurement_and_cuts_no_error_into_a_pipe() -> None:
    error = "x" * 500

    def row(*, whole_errors: bool = False, **fields: Any) -> str:
        hosts = [{"host": "h", "models": [MODEL | fields]}]
        return hosted_table(hosts, whole_errors=whole_errors)[1]

    assert "about 9.1 s" in row()
    assert " 9.1 s" in row(load_s=9.0)
    assert "about" not in row(load_s=9.0)
    assert "now" in row(state="awake", ready_in_s=0.0)
    failed = {"state": "failed", "error": error}
    assert "9.1" not in row(**failed)
    assert error in row(**failed, whole_errors=True)
    assert error not in row(**failed)
    cordoned = row(state="awake", num_ready=2, num_withheld=2)
    assert "2, 2 cordoned" in cordoned
    assert "now" not in cordoned
    assert "now" in row(state="awake", num_ready=2, num_withheld=1)


def test_model_whose_workers_are_cordoned_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cordoned = {"state": "awake", "num_ready": 1, "num_withheld": 1}
    woken = run(monkeypatch, Operator(cordoned), "wake", "m")
    assert "headrace uncordon" in str(woken.exception)
