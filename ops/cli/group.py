"""The top of the command line: which commands there are, each loaded only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata

import click

from ops.cli.other_commands import instead_of

# A name this similar to one of ours is a typo, even if another server has a command of that name.
_LIKENESS = 0.87
_COMMANDS = (
    "up",
    "gateway",
    "worker",
    "host",
    "model",
    "setup",
    "doctor",
    "chat",
    "publish",
    "dead",
    "drain",
    "cordon",
    "uncordon",
    "batch",
    "usage",
    "top",
    "request",
    "keys",
    "tenant",
    "detect",
    "worker-login",
    "quantize",
    "perplexity",
    "golden",
    "plan",
    "simulate",
    "cache",
    "bench",
)


class LazyGroup(click.Group):
    """Finds the command `some-name` as `ops.cli.some_name.command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which one meets them."""
        return list(_COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; `help COMMAND` and `version` are what people type for `COMMAND --help` and `--version`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.message} Options stand behind a command: headrace up ...", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; of one that there is not the nearest is told, or what does the same."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if nearest := difflib.get_close_matches(args[0].lower(), _COMMANDS, 1, _LIKENESS):
                raise click.UsageError(f"{error.message} Did you mean '{nearest[0]}'?", ctx) from None
            if told := instead_of(args):
                raise click.UsageError(f"{error.message} {told}", ctx) from None
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
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def headrace() -> None:
    """Serve language models on a queue: an OpenAI-compatible gateway, NATS JetStream, and workers.

    `headrace up` starts the whole system on this machine.
    """
