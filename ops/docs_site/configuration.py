"""The page `ops/docs/configuration.md`, made of all settings: `python -m ops.docs_site.configuration` prints it.

Each setting is described once, in its settings class; the options, `--help` and this page are made of that.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from ops.cli.group import headrace
from ops.cli.options import SettingOption, variable_of

_HEAD = """\
# Configuration

Every setting is an option of its command and an environment variable; an option wins over its variable. A `HEADRACE_*`
variable that nothing reads is refused, with the nearest name. Options without a variable apply to one call.
Settings are resolved once, at start, and a bad one stops the process with one line that names the allowed values.
`headrace COMMAND --help` prints the same. Whole numbers may have a unit: 4k is 4000, 4K and 4KiB are 4096, 8GB is
8000000000.

`headrace up` takes all settings of the gateway and the worker besides its own, except their addresses.
"""
# Variables that no command reads.
_OTHERS = """
## Other variables

| variable | meaning |
|---|---|
| `HEADRACE_CACHE_DIR` | Folder of the compiled CPU kernels; `headrace` in the user's cache folder if not set. |
| `HEADRACE_CPU_KERNELS` | `off` uses plain PyTorch instead of the compiled CPU kernels. |
| `HEADRACE_NATS_GATEWAY_PASSWORD`, `…_WORKER_…`, `…_BATCH_…`, `…_ADMIN_…` | Passwords of the roles, read by NATS. |
| `HEADRACE_MODEL_DIR`, `HEADRACE_REDIS_PASSWORD`, `HEADRACE_GRAFANA_PASSWORD` | Read by `compose.yaml`. |
| `HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN` | Where models of the hub are kept and fetched. |
| `CUDA_VISIBLE_DEVICES` | Which GPU a worker sees: run one worker for each. |

This page is made of the settings classes: `python -m ops.docs_site.configuration > ops/docs/configuration.md`.
"""


def page() -> str:
    """Return the page."""
    ctx = click.Context(headrace)
    parts = [_HEAD]
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
    return "\n".join(parts) + _OTHERS


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
    print(page(), end="")
