"""`headrace model`, without a system and beside one that is played."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli import host, model
from ops.cli.model import hosted_table
from ops.stack.hosting.worker_process import DRAIN_S, EXIT_S
from shared.config import resolve
from shared.errors import DependencyError

MODEL = {"name": "m", "state": "asleep", "num_ready": 0, "on_demand": True, "ready_in_s": 9.1, "need_bytes": 0}
MODEL |= {"load_s": None, "error": None}


class Operator:
    """Takes orders, and tells of a model that is in these states, one after the other."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states)
        self.orders: list[dict[str, Any] | None] = []
        self.paths: list[str] = []

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if method == "POST":
            self.orders.append(body)
            self.paths.append(path)
            return {"host": "h", "name": "m"}
        state = self.states.pop(0) if self.states else None
        if state is None:
            raise KeyboardInterrupt
        other = {"host": "g", "models": [MODEL | {"state": "failed", "error": "of another host"}]}
        neighbour = MODEL | {"name": "n", "state": "failed", "error": "of another model"}
        return {"hosts": [other, {"host": "h", "models": [neighbour, MODEL | state] if state else [neighbour]}]}


def run(monkeypatch: pytest.MonkeyPatch, operator: Operator, *words: str) -> Any:
    monkeypatch.setattr(model, "find_operator", lambda _: operator)
    monkeypatch.setattr(model, "_POLL_S", 0.0)
    return CliRunner().invoke(model.command, words)


@pytest.mark.parametrize("name", list(model.command.commands))
def test_help_needs_no_system(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(model.command, [name, "--help"])
    assert (shown.exit_code, "Usage:" in shown.output) == (0, True)


async def test_workers_of_a_host_that_fails_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[float] = []

    class FailingHost:
        def __init__(self, *parts: object, **options: object) -> None:
            pass

        async def start(self) -> None:
            pass

        async def run(self) -> None:
            raise DependencyError("NATS is away")

        async def stop(self, timeout_s: float) -> None:
            stopped.append(timeout_s)

    monkeypatch.setattr("ops.stack.hosting.host.Host", FailingHost)
    with pytest.raises(DependencyError):
        await host._run(resolve(host.HostConfig, {"state_dir": str(tmp_path)}, {}))
    assert stopped == [DRAIN_S + EXIT_S]


def test_only_what_is_given_is_ordered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    operator = Operator()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in (
        ("replace", "m", "new", "--no-wait"),
        ("replace", "m", "new", "--no-wait", "--memory-bytes", "100GB", "--always"),
        ("load", "m", "here", "--no-wait", "--on-demand", "--idle-s", "5", "--option", "max-num-seqs=a=b"),
        ("unload", "m"),
        ("sleep", "m", "--host", "h"),
    ):
        done = run(monkeypatch, operator, *words)
        assert (done.exit_code, done.output) == (0, f"h: {words[0]} m\n")
    plain = {"name": "m", "path": "new", "options": {}}
    assert operator.orders == [
        plain,
        plain | {"memory_bytes": 100_000_000_000, "on_demand": False},
        # A directory that is here is named whole, since the host has another one.
        plain | {"path": str(tmp_path / "here"), "on_demand": True, "idle_s": 5, "options": {"max_num_seqs": "a=b"}},
        {"name": "m"},
        {"name": "m", "host": "h"},
    ]
    actions = ("replace", "replace", "load", "unload", "sleep")
    assert operator.paths == [f"/v1/hosted_models/{action}" for action in actions]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("load", "--memory-bytes", "much"), "such as 24GB"),
        (("load", "--memory-bytes", "0"), "at least 1"),
        (("load", "--idle-s", "5"), "sleep"),
        (("load", "--option", "max_num_seqs"), "write NAME=VALUE"),
        (("replace", "--always", "--idle-s", "300"), "leave out --idle-s or --always"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_ordered(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Operator()
    refused = run(monkeypatch, operator, words[0], "m", "new", *words[1:])
    assert (refused.exit_code, told in refused.output, operator.orders) == (2, True, [])


def test_waiting_for_room_and_an_interrupt_have_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = {"state": "no_room"}
    stopped = run(monkeypatch, Operator(no_room, no_room), "load", "m", "new")
    assert stopped.output.count("waits for room") == 1
    assert "the order goes on; `headrace model unload m` takes it back" in stopped.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("replace", "m", "new"), "the order goes on; m stays what it was until the new one serves"),
        (("wake", "m"), "the order goes on; once m serves, `headrace model sleep m` takes it back"),
    ],
)
def test_interrupt_advises_no_unload_where_that_removes_what_was_there_before(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = run(monkeypatch, Operator({"state": "loading"}), *words)
    assert told in stopped.output
    assert "unload" not in stopped.output


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"state": "failed", "error": "no tokenizer"},
            "m cannot be started: no tokenizer; it is tried again every minute until `headrace model unload m`",
        ),
        # The old workers serve again.
        ({"state": "awake", "error": "no tokenizer", "num_ready": 1}, "m cannot be started: no tokenizer"),
        # It is loaded on demand, and nothing starts it any more.
        ({"state": "asleep", "error": "no tokenizer"}, "m cannot be started: no tokenizer"),
        ({"state": "stopping", "error": "no tokenizer"}, "m cannot be started: no tokenizer"),
        ({"state": "asleep"}, "m sleeps again: it was ordered to, or no request came for it"),
        ({}, "h does not have m any more"),
    ],
)
def test_failed_load_says_how_it_ends(state: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(run(monkeypatch, Operator({"state": "loading"}, state), "load", "m", "new").exception) == told


@pytest.mark.parametrize(
    "state",
    [
        {"state": "asleep", "error": "no tokenizer"},
        {"state": "loading", "error": "no tokenizer"},
        {"state": "failed", "error": "of the old one, which has been started again"},
        {"state": "no_room", "error": "no tokenizer"},
        {"state": "stopping", "error": "no tokenizer"},
        {"state": "awake", "error": "no tokenizer", "num_ready": 1},
        # The old one has been started again, and all is well with it.
        {"state": "awake", "num_ready": 1},
    ],
)
def test_replacement_that_was_undone_is_told_whatever_became_of_the_old_one(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    undone = state | {"replace_error": "no tokenizer"}
    loading = {"state": "awake", "num_ready": 0, "error": None}
    refused = run(monkeypatch, Operator(loading, undone), "replace", "m", "new")
    assert str(refused.exception) == "m cannot be replaced and stays what it was: no tokenizer"
    served = run(monkeypatch, Operator(undone | {"state": "awake", "num_ready": 1}), "wake", "m")
    assert "m serves after" in served.output


def test_wait_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.cli.status_line.TELL_EVERY_S", 0.0)
    done = run(monkeypatch, Operator({"state": "loading"}, {"state": "awake", "num_ready": 1}), "load", "m", "new")
    assert "m: loading, ready in about 9.1 s (0 s)\n" in done.stderr
    late = {"state": "loading", "ready_in_s": 0.0}, {"state": "loading", "ready_in_s": 5.0}
    done = run(monkeypatch, Operator(*late, {"state": "awake", "num_ready": 1}), "load", "m", "new")
    assert "m: loading, longer than the 0 s that were expected (0 s)\n" in done.stderr
    replaced = run(monkeypatch, Operator({"state": "awake"}, {"state": "awake", "num_ready": 1}), "replace", "m", "new")
    assert "m: the new one loads (0 s)\n" in replaced.stderr


def test_load_is_waited_for_and_models_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    awake = {"state": "awake", "num_ready": 1}
    retried = {"state": "loading", "error": "the first start failed"}
    done = run(monkeypatch, Operator({"state": "loading"}, retried, awake), "wake", "m")
    assert re.fullmatch(r"h: wake m\nm serves after \d+\.\d s\n", done.output)
    assert len(pauses) == 3, "it does not ask without a pause"
    table, listed = run(monkeypatch, Operator(awake), "ls"), run(monkeypatch, Operator(awake), "ls", "--json")
    assert [line.split()[:4] for line in table.output.splitlines()[1:]] == [
        ["m", "g", "failed", "0"],
        ["n", "h", "failed", "0"],
        ["m", "h", "awake", "1"],
    ]
    assert [host["host"] for host in json.loads(listed.output)] == ["g", "h"]


def test_table_tells_no_guess_as_a_measurement_and_cuts_no_error_into_a_pipe() -> None:
    error = "x" * 500

    def row(*, whole_errors: bool = False, **fields: Any) -> str:
        hosts = [{"host": "h", "models": [MODEL | fields]}]
        return hosted_table(hosts, whole_errors=whole_errors)[1]

    assert "about 9.1 s" in row()
    measured = row(load_s=9.0, need_bytes=24_000_000_000)
    assert measured.split() == ["m", "h", "asleep", "0", "on", "demand", "9.1", "s", "24.00", "GB"]
    assert "always" in row(on_demand=False)
    assert "now" in row(state="awake", ready_in_s=0.0)
    failed = {"state": "failed", "error": error}
    assert "9.1" not in row(**failed)
    assert error in row(**failed, whole_errors=True)
    assert error not in row(**failed)
    cordoned = row(state="awake", num_ready=2, num_withheld=2)
    assert "2, 2 of them cordoned" in cordoned
    assert "now" not in cordoned
    assert "now" in row(state="awake", num_ready=2, num_withheld=1)


def test_model_whose_workers_are_cordoned_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cordoned = {"state": "awake", "num_ready": 1, "num_withheld": 1}
    woken = run(monkeypatch, Operator(cordoned), "wake", "m")
    assert "headrace uncordon" in str(woken.exception)
