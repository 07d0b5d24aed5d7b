from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from ops.cli.group import headrace
from ops.cli.options import SettingOption
from ops.cli.variables import check_variables, known_variables
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "compose.yaml", "ops/**/*.md", "ops/**/*.conf", "ops/**/*.py", "Makefile")
# What chooses among the letters, jobs or keys of one call; a variable that is set for another command must not.
WITHOUT_VARIABLE = ("adapter ", "alias ", "batch ", "canary ", "dead ", "keys rotate", "keys watermark", "model ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HEADRACE_MODLE", "did you mean HEADRACE_MODEL?"),
        ("HEADRACE_MAX_NUM_SEQ", "did you mean HEADRACE_MAX_NUM_SEQS?"),
        ("HEADRACE_NATS_USR", "did you mean HEADRACE_NATS_USER?"),
        ("HEADRACE_SPECULATION", "did you mean HEADRACE_SPECULATIVE?"),
        # PROMPT is more like it, but of another command.
        ("HEADRACE_PROT", "did you mean HEADRACE_PORT?"),
        ("HEADRACE_XYZZY", "`headrace COMMAND --help` names those that there are"),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_variables({"HEADRACE_PORT"}, {"HEADRACE_PORT": "1", name: "x"})
    assert str(refused.value) == f"{name}: there is no such setting; {hint}"


def test_variables_of_other_commands_and_of_nats_are_known() -> None:
    names = ("WINDOW", "TEXT", "NATS_BATCH_PASSWORD", "CACHE_DIR", "REQUESTS_PER_MINUTE")
    check_variables((), {f"HEADRACE_{name}": "x" for name in names} | {"PATH": "/bin"})


def test_variables_that_are_set_for_all_commands_import_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.cli.variables.known_variables", lambda: pytest.fail("every command is imported"))
    names = ("HEADRACE_AUDIT_FILE", "HEADRACE_CACHE_DIR", "HEADRACE_NATS_BATCH_PASSWORD")
    check_variables((), dict.fromkeys(names, "x"))


def test_every_variable_that_the_tree_names_is_known() -> None:
    mentioned: dict[str, str] = {}
    for pattern in DOCUMENTS:
        for path in ROOT.glob(pattern):
            for name in re.findall(r"\bHEADRACE_[A-Z0-9_]*[A-Z0-9]\b(?![_*{<])", path.read_text(errors="replace")):
                mentioned[name] = str(path.relative_to(ROOT))
    assert len(mentioned) > 50
    for name, path in mentioned.items():
        try:
            check_variables((), {name: "x"})
        except ConfigError as error:
            pytest.fail(f"{path}: {error}")


def test_every_option_has_a_variable() -> None:
    def walk(command: click.Command, path: str) -> None:
        for parameter in command.params:
            is_other = isinstance(parameter, click.Option) and not isinstance(parameter, SettingOption)
            if is_other and not parameter.is_eager:
                assert parameter.envvar or path.startswith(WITHOUT_VARIABLE), f"{path} {parameter.opts}"
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), name)
                assert found is not None
                walk(found, f"{path} {name}".strip())

    walk(headrace, "")
    assert len(known_variables()) > 100
    assert not [name for name in os.environ if name.startswith("HEADRACE_") and name not in known_variables()]
