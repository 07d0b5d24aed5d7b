"""Commands of other servers, and what people type for help."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from ops.cli.group import _ROWS, ADVICE, headrace, instead_of


def _output(*arguments: str) -> str:
    result = CliRunner().invoke(headrace, arguments, prog_name="headrace")
    assert result.exit_code == 0, result.output
    return result.output


def test_help_and_version_do_what_one_expects() -> None:
    assert _output("help") == _output("--help") == _output("-h")
    assert _output("help", "up") == _output("up", "--help") == _output("up", "-h")
    assert _output("help", "keys", "create") == _output("keys", "create", "--help")
    assert _output("version") == _output("-V") == _output("--version")


def test_help_has_both_names_whoever_asked_first() -> None:
    command = headrace.get_command(click.Context(headrace), "worker")
    assert command is not None
    command.get_params(click.Context(command))
    assert _output("worker", "-h") == _output("worker", "--help")


def test_commands_of_others_are_none_of_ours_and_each_is_explained_once() -> None:
    assert ADVICE.keys() & headrace.list_commands(click.Context(headrace)) == set()
    assert len(ADVICE) == sum(len(names.split()) for _, names in _ROWS)


def test_commands_that_are_named_instead_exist() -> None:
    ctx = click.Context(headrace)
    named = {word for name in ADVICE for word in re.findall(r"`headrace ([a-z-]+)", instead_of([name]) or "")}
    assert {"up", "doctor", "batch", "keys"} <= named
    assert [name for name in named if headrace.get_command(ctx, name) is None] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["serve", "Qwen/Qwen3-0.6B", "--max-model-len", "4k"],
            "`headrace up --model Qwen/Qwen3-0.6B --max-model-len 4k`",
        ),
        (["serve"], "`headrace up --model MODEL`"),
        (["run", "my model"], "`headrace up --model 'my model'`, then talk to it with `headrace chat`"),
        (["collect_env"], "`headrace doctor`"),
        (["PS"], "`headrace doctor`"),
        (["xyzzy"], "nothing"),
    ],
)
def test_what_was_typed_is_in_the_answer(words: list[str], told: str) -> None:
    assert told in (instead_of(words) or "nothing")


@pytest.mark.parametrize("typed", ["stop", "status", "usge", "quantise"])
def test_the_top_asks_for_what_was_meant(typed: str) -> None:
    result = CliRunner().invoke(headrace, [typed], prog_name="headrace")
    assert f"No such command '{typed}'. " in result.output
    assert ("Did you mean" in result.output) is (typed in ("usge", "quantise"))
