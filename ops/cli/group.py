"""The top of the command line: which commands there are, each loaded only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import shlex
from collections.abc import Sequence

import click

_DOCTOR = "`headrace doctor` says what runs here, which models are served, and which problems there are."
_STOP = "Ctrl-C in its terminal stops `headrace up`; SIGTERM stops any process in order."
_UP = "Serve a model with `headrace up --model {model}`."
_RUN = "Serve a model with `headrace up --model {model}`, then talk to it with `headrace chat` in another terminal."
_PULL = "A model is downloaded when it is served for the first time: `headrace up --model {model}`."
_SETTINGS = "Settings are options and variables: `headrace up --help`, ops/docs/configuration.md."

# Advice, and the other servers' commands for which it is given.
_ROWS: tuple[tuple[str, str], ...] = (
    (_UP, "serve server launch launch-server start load deploy api-server"),
    (_RUN, "run"),
    (_PULL, "pull download fetch"),
    (_STOP, "stop down kill restart shutdown unload exit quit"),
    (_DOCTOR, "ps status ls list models show info check check-env collect-env env diagnose"),
    ("`headrace quantize` makes a smaller copy of a model.", "create convert export compress"),
    ("Logs of `headrace up` are in `logs` of its state directory; other parts write them to standard error.", "logs"),
    ("Did you mean `headrace keys`?", "key token api-key apikey"),
    ("Submit a file of OpenAI's Batch API with `headrace batch submit FILE --watch`.", "run-batch"),
    ("Continue a text with `headrace chat TEXT`.", "complete completion generate ask prompt"),
    (_SETTINGS, "config configure init settings"),
    ("The API does it: POST /v1/embeddings.", "embed embedding embeddings"),
)


ADVICE = {name: advice for advice, names in _ROWS for name in names.split()}
"""Advice by the name of another server's command."""


def instead_of(words: Sequence[str]) -> str | None:
    """Return the advice for a command of another server, as typed with its arguments; None if no server has it."""
    advice, given = ADVICE.get(words[0].lower().replace("_", "-")), words[1:]
    has_model = bool(given) and not given[0].startswith("-")
    return None if advice is None else advice.format(model=shlex.join(given) if has_model else "MODEL")


# A name this similar to one of ours is a typo, even if another server has a command of that name.
_LIKENESS = 0.87
_COMMANDS = (
    *("up", "gateway", "worker", "host", "model", "adapter", "setup", "doctor", "chat", "dead"),
    *("drain", "cordon", "uncordon", "role", "alias", "canary", "batch", "usage", "top", "request", "keys"),
    *("tenant", "detect", "worker-login", "quantize", "perplexity", "golden", "plan", "simulate", "cache", "bench"),
)
# Where a command is that has no file of its own.
_PLACES = {
    "drain": ("worker_orders", "DRAIN"),
    "cordon": ("worker_orders", "CORDON"),
    "uncordon": ("worker_orders", "UNCORDON"),
    "role": ("worker_orders", "ROLE"),
    "canary": ("alias", "canary"),
    "worker-login": ("tenant", "worker_login"),
    "usage": ("top", "USAGE"),
}


class LazyGroup(click.Group):
    """Finds the command `some-name` as `ops.cli.some_name.command`, or in its place."""

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
        """Find the command; the error for an unknown one names the nearest, or the one that does the same."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0].lower(), _COMMANDS, 1, _LIKENESS)
            told = None if near else instead_of(args)
            near = near or difflib.get_close_matches(args[0], _COMMANDS, 1)
            if told or near:
                raise click.UsageError(f"{error.message} {told or f'Did you mean {near[0]!r}?'}", ctx) from None
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in _COMMANDS:
            return None
        module, name = _PLACES.get(cmd_name, (cmd_name, "command"))
        command = getattr(importlib.import_module(f"ops.cli.{module}"), name)
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
