"""Renews the page `ops/docs/configuration.md`: `python -m ops.docs_site.configuration ops/docs/configuration.md`.

Each setting is described once, in its settings class; the options, `--help` and this page are made of that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ops.cli.group import headrace
from ops.cli.options import SettingOption, variable_of


def page(current: str) -> str:
    """Return the page with the sections of the commands as the settings are now."""
    ctx = click.Context(headrace)
    parts = [current[: current.index("\n\n## headrace ")]]
    for name in headrace.list_commands(ctx):
        command = headrace.get_command(ctx, name)
        assert command is not None
        parts.append("\n".join(_section(name, command)))
        if isinstance(command, click.Group):
            for inner in command.list_commands(ctx):
                found = command.get_command(ctx, inner)
                assert found is not None
                if any(_row(parameter) for parameter in found.params):
                    parts.append("\n".join(_section(f"{name} {inner}", found)))
    return "\n".join(parts) + current[current.index("\n## Other variables") :]


def _section(name: str, command: click.Command) -> Iterator[str]:
    yield f"\n## headrace {name}\n"
    yield (command.help or "").strip().split("\n\n")[0].replace("\n", " ") + "\n"
    rows = [row for parameter in command.params if (row := _row(parameter)) is not None]
    # Those of the parts are in their own sections.
    own = [row for parameter, row in rows if not (isinstance(parameter, SettingOption) and parameter.section)]
    if own:
        yield "| option | variable | default | meaning |"
        yield "|---|---|---|---|"
        yield from own
    if len(own) < len(rows):
        yield "\nAnd those of `headrace gateway` and `headrace worker`."


def _row(parameter: click.Parameter) -> tuple[click.Parameter, str] | None:
    if not isinstance(parameter, click.Option) or parameter.is_eager:
        return None
    variable = variable_of(parameter)
    text, _, facts = (parameter.help or "").partition("  [")
    listed = [fact for fact in facts.rstrip("]").split("; ") if fact and fact != variable]
    default = next((fact.removeprefix("default ") for fact in listed if fact.startswith("default ")), "")
    if not isinstance(parameter, SettingOption) and isinstance(parameter.default, str | int) and parameter.default:
        default = str(parameter.default)
    bounds = [fact for fact in listed if not fact.startswith("default ")]
    options = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts) if option[0] == "-")
    if isinstance(parameter.metavar, str) and "|" in parameter.metavar:
        bounds.append("one of " + ", ".join(f"`{choice}`" for choice in parameter.metavar.split("|")))
    meaning = " ".join([text.strip(), *(f"({bound})" for bound in bounds)]).replace("|", "\\|").replace("\n", " ")
    cells = (options, f"`{variable}`" if variable else "", f"`{default}`" if default else "", meaning)
    return parameter, f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
