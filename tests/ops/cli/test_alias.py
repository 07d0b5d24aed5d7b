"""`headrace alias` and `canary` name the tenant whose alias they change, and the canary that ends with it."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli import alias
from ops.cli.running_system import OperatorAccess


def entry(tenant: str | None, model: str, canary: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": "chat", "tenant": tenant, "model": model, "canary": canary}


class Operator:
    """Answers as the operator's port does: `GET` with `before`, orders with `after`."""

    def __init__(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        self._before, self._after = before, after

    def call(self, method: str, _path: str, _body: object = None) -> dict[str, Any]:
        return {"aliases": self._before if method == "GET" else self._after, "canaries": self._after}


def told(monkeypatch: pytest.MonkeyPatch, operator: Operator, *arguments: str) -> list[str]:
    def find(_access: OperatorAccess) -> Operator:
        return operator

    monkeypatch.setattr(alias, "find_operator", find)
    command = alias.canary if arguments[0] == "start" else alias.command
    done = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_set_says_whose_alias_it_is_and_that_a_canary_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = {"model": "two", "percent": 50.0}
    before = [entry(None, "one", canary), entry("acme", "one")]
    assert told(monkeypatch, Operator(before, []), "set", "chat", "three") == [
        "chat stands for three for all tenants",
        "its canary, 50% to two, is ended",
    ]
    assert told(monkeypatch, Operator(before, []), "set", "chat", "three", "--tenant", "acme") == [
        "chat stands for three for the tenant acme"
    ]


def test_start_of_a_canary_that_is_not_served_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [{"alias": "chat", "tenant": None, "verdict": "gets no requests: no worker serves it"}]
    assert told(monkeypatch, Operator([], begun), "start", "chat", "--to", "two", "--percent", "50") == [
        "50% of chat goes to two (gets no requests: no worker serves it)"
    ]


def test_removal_names_the_tenant_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [entry("acme", "two"), entry(None, "one")]
    assert told(monkeypatch, Operator([], left[:1]), "rm", "chat") == [
        "the alias chat for all tenants is removed",
        "chat still stands for two for the tenant acme",
    ]
    assert told(monkeypatch, Operator([], left[1:]), "rm", "chat", "--tenant", "acme") == [
        "the alias chat for the tenant acme is removed",
        "chat still stands for one for all tenants",
    ]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("words", [["start", "chat", "--to", "two", "--percent"], ["percent", "chat"]])
def test_share_that_is_no_number_is_refused(words: list[str], number: str) -> None:
    done = CliRunner().invoke(alias.canary, [*words, "--", number] if words[0] == "percent" else [*words, number])
    assert done.exit_code == 2
    assert "is not" in done.output


def test_limit_of_log_probabilities_that_are_not_compared_is_refused() -> None:
    words = ["start", "chat", "--to", "two", "--percent", "5", "--max-logprob-drop", "0.1", "--logprob-share", "0"]
    done = CliRunner().invoke(alias.canary, words)
    assert (done.exit_code, "--max-logprob-drop is not read with --logprob-share 0" in done.output) == (2, True)
