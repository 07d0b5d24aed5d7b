"""The top of the command line: which commands there are, each loaded only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata

import click

_COMMANDS = (
    "up",
    "gateway",
    "worker",
    "setup",
    "doctor",
    "chat",
    "publish",
    "dead",
    "keys",
    "tenant",
    "worker-login",
    "quantize",
    "perplexity",
    "train-draft",
    "bench",
)


class LazyGroup(click.Group):
    """Finds the command `some-name` as `ops.cli.some_name.command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which one meets them."""
        return list(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; one that there is not is told the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args[0] == "serve":
                raise click.UsageError(
                    f"{error.message} Serve a model with `headrace up --model MODEL`.", ctx
                ) from None
            if args[0] in ("help", "version"):
                raise click.UsageError(f"{error.message} Did you mean `headrace --{args[0]}`?", ctx) from None
            if nearest := difflib.get_close_matches(args[0], _COMMANDS, 1):
                raise click.UsageError(f"{error.message} Did you mean '{nearest[0]}'?", ctx) from None
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"ops.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"headrace {importlib.metadata.version('headrace')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Settings can be given as environment variables too, named in brackets: --nats-url is HEADRACE_NATS_URL. "
    "An option wins over its variable. A HEADRACE_* variable that nothing reads is refused.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def headrace() -> None:
    """Serve language models on a queue: an OpenAI-compatible gateway, NATS JetStream, and workers.

    `headrace up` starts the whole system on this machine.
    """
