"""Command line options made from settings classes, so that each setting is described in one place."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from ops.cli.other_options import explain
from ops.cli.variables import UnknownVariableError, check_variables
from shared.config import PREFIX, Constraint, base_type, file_variable, resolve, shown_bound, variable_name
from shared.errors import ConfigError, HeadraceError

T = TypeVar("T")
_WIDEST_NAMES = 76
_METAVARS = {"int": "N", "float": "NUMBER", "Path": "PATH", "str": "TEXT"}
_VARIABLE = re.compile(PREFIX + r"[A-Z0-9_]+")


class SettingOption(click.Option):
    """The option of a setting.

    Attributes:
        variable: The environment variable of the same setting.
        file_variable: That of the file that may hold it; None where it is not a secret.
        section: Heading under which `--help` lists it; None is the command's own options.
    """

    def __init__(
        self, field: dataclasses.Field[Any], kind: type, section: str | None, *, multiple: bool = False
    ) -> None:
        constraint: Constraint = field.metadata["setting"]
        self.variable = variable_name(field.name)
        self.file_variable = file_variable(self.variable) if constraint.secret else None
        self.section = section
        self._choices: Sequence[str] = ()
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{constraint.help}  [{'; '.join([self.variable, *_facts(field, constraint)])}]"
        if kind is bool:
            super().__init__([f"{flag}/--no-{flag[2:]}"], default=None, help=text)
            return
        metavar = "|".join(constraint.choices) if constraint.choices else _METAVARS.get(kind.__name__, "TEXT")
        self._choices = constraint.choices or ()
        names = [flag] if constraint.alias is None else [flag, constraint.alias]
        super().__init__([*names, field.name], type=str, default=None, metavar=metavar, help=text, multiple=multiple)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and meaning; many choices stand in the meaning, where lines can be broken."""
        record = super().get_help_record(ctx)
        if record is None or len(record[0]) <= _WIDEST_NAMES:
            return record
        choices = "|".join(self._choices)
        return record[0].replace(choices, "NAME"), f"{record[1]}  One of {', '.join(self._choices)}."


class VariableOption(click.Option):
    """An option that is not a setting, but can be given as a variable too; `--help` names it as it does a setting's."""

    def __init__(self, names: Sequence[str], *, envvar: str, **attributes: Any) -> None:
        if isinstance(attributes.get("type"), click.IntRange):
            attributes.setdefault("metavar", _METAVARS["int"])
        super().__init__(names, envvar=envvar, **attributes)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and meaning, and in brackets the variable, the default and the bounds."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        shown = self.default if self.show_default and self.default not in (None, "") else None
        facts = [str(self.envvar), *([] if shown is None else [f"default {shown}"])]
        if isinstance(self.type, click.IntRange) and self.type.min is not None:
            # JSON's largest exact whole number is no limit that a user would reach.
            is_open = self.type.max is None or self.type.max >= 2**53
            facts.append(f"at least {self.type.min}" if is_open else f"{self.type.min} to {self.type.max}")
        return record[0], f"{self.help}  [{'; '.join(facts)}]"


def variable_of(parameter: click.Parameter) -> str | None:
    """Return the environment variable that an option can be given as."""
    variable = parameter.variable if isinstance(parameter, SettingOption) else parameter.envvar
    return None if variable is None else str(variable)


def variables_of(parameter: click.Parameter) -> list[str]:
    """Return an option's environment variables: its own, and that of a secret's file."""
    found = (variable_of(parameter), parameter.file_variable if isinstance(parameter, SettingOption) else None)
    return [variable for variable in found if variable is not None]


class SettingsCommand(click.Command):
    """A command whose errors name a setting as the user gave it: by its option, or by its variable."""

    def __init__(self, *args: Any, first_options: Collection[str] = (), **attributes: Any) -> None:
        """Take what `click.Command` takes. `--help` shows the settings `first_options`, `--help-all` shows all."""
        super().__init__(*args, **attributes)
        self._first_options = frozenset(first_options)
        if first_options:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    help="Show every option and exit.",
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                )
            )

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the names of the option of help: click keeps those that the first context of a process asks for."""
        return ["-h", "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; the error for another server's option, or a model without `--model`, names our form."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            told = self.explain(_as_typed(error.option_name, given, self._names()))
            if told is not None:
                raise click.UsageError(told, ctx) from None
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument") and (rule := _rule_of_arguments(self)):
                raise click.UsageError(f"{error.message}. {rule}", ctx) from None
            raise

    def explain(self, option: str) -> str | None:
        """Return the error for an unknown option, given as typed; None for click's own message."""
        return explain(option, self.name or "", self._names())

    def _names(self) -> set[str]:
        return {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        with _named_as_given(ctx):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List options under the headings of their sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        num_hidden = 0
        for parameter in self.get_params(ctx):
            is_first = not self._first_options or parameter.name in self._first_options
            if isinstance(parameter, SettingOption) and not is_first and _ALL not in ctx.meta:
                num_hidden += 1
                continue
            if (record := parameter.get_help_record(ctx)) is not None:
                section = parameter.section if isinstance(parameter, SettingOption) else None
                sections.setdefault(section or "Options", []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)
        if num_hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows {num_hidden} options more.")


_ALL = "headrace.help_all"


def _show_all(ctx: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _as_typed(option: str, given: Sequence[str], known: Collection[str]) -> str:
    """Return the word that an option was part of: of `-tp` click tells `-t`, and of `-hf` (where `-h` is one) `-f`."""
    words = [word.split("=")[0] for word in given]
    if option.startswith("--") or option in words:
        return option
    clusters = (word for word in words if word.startswith("-") and word[:2] != "--" and option[1:] in word[1:])
    return next((word for word in clusters if word not in known), option)


def _rule_of_arguments(command: click.Command) -> str | None:
    if any(isinstance(parameter, click.Argument) and parameter.name == "prompt" for parameter in command.params):
        return "A prompt of several words stands in quotes."
    if any("--model" in option.opts for option in command.params):
        return "Each option has one value and a switch none; a model is named as --model."
    return None


def _has(command: click.Command, option: str) -> bool:
    return any(option in each.opts for each in command.params)


# Names that people type for one another; that which a group has is meant, by the first line that has both.
_SYNONYMS = tuple(
    line.split()
    for line in (
        "watch status progress follow wait",
        "results result output download",
        "rotate renew regenerate",
        "check verify",
        "update replace edit change rename modify swap set",
        "create submit add load set record make new generate issue put publish run start replace update swap",
        "rm revoke drop cancel unload rollback clear remove delete del purge prune disable stop abort kill undo",
        "ls list show get info ps status stats",
    )
)


class SettingsGroup(click.Group):
    """A group of commands that share settings, with the same kind of errors."""

    def has(self, option: str) -> bool:
        """Whether an option is the group's own, which stands before the command."""
        return _has(self, option)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for an unknown one names the right one."""
        word = args[0].lower()
        if word not in self.commands:
            alike = (name for names in _SYNONYMS if word in names for name in names if name in self.commands)
            if (meant := next(alike, None)) is not None:
                raise click.UsageError(f"No such command {args[0]!r}. Did you mean {meant!r}?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            with _named_as_given(ctx):
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            if self.has(error.option_name):
                place = f"It belongs before the command: {ctx.command_path} {error.option_name} ..."
                raise click.UsageError(f"{error.message} {place}", error.ctx) from None
            if others := [name for name, each in self.commands.items() if _has(each, error.option_name)]:
                have = " and ".join(f"`{ctx.command_path} {name}`" for name in others)
                raise click.UsageError(f"{error.message} It is an option of {have}.", error.ctx) from None
            raise
        except click.UsageError as error:
            extra = re.fullmatch(r"Got unexpected extra arguments? \((\S+).*\)", error.message)
            if extra and error.ctx and any("--name" in option.opts for option in error.ctx.command.params):
                raise click.UsageError(f"{error.message}. Did you mean '--name {extra[1]}'?", error.ctx) from None
            raise


def settings_command(
    cls: type[T],
    name: str,
    run: Callable[..., int | None],
    arguments: Sequence[click.Parameter] = (),
    kind: type[SettingsCommand] = SettingsCommand,
) -> SettingsCommand:
    """Make a command that resolves `cls` from its options and the environment and calls `run` with it.

    Arguments of the command line follow by name. The docstring of `run` is the command's help.
    """
    names = [argument.name for argument in arguments]

    def callback(**values: Any) -> int | None:
        given = {key: values.pop(key) for key in names}
        return run(resolve_settings(cls, values), **given)

    return kind(name, callback=callback, params=[*arguments, *options(cls)], help=run.__doc__)


def resolve_settings(cls: type[T], values: Mapping[str, Any]) -> T:
    """Resolve the settings of a command from its options and the environment.

    Raises:
        ConfigError: A value cannot be used, or the environment has a variable that is not a setting of any command.
    """
    own = {variable for option in options(cls) for variable in variables_of(option)}
    check_variables(own, os.environ)
    return resolve(cls, values, os.environ)


def options(
    cls: type[Any], section: str | None = None, *, without: Collection[str] = (), multiple: Collection[str] = ()
) -> list[SettingOption]:
    """Make an option of each setting, a class's own before those it inherits, except those `without`.

    Values stay text: `resolve` converts and checks them, as it does variables. Those of `multiple` are tuples.
    """
    hints = typing.get_type_hints(cls)
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)
    return [
        SettingOption(field, base_type(hints[field.name]), section, multiple=field.name in multiple)
        for field in fields
        if field.name not in without
    ]


def checked_name(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Return the name of a tenant or model that a command was given."""
    from shared.errors import InvalidNameError
    from shared.subjects import check_name

    try:
        if name is not None:
            check_name(name)
    except InvalidNameError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return name


def check_writable(variable: str, file: Path | None) -> None:
    """Find out before anything is computed that a file could not be written then."""
    try:
        if file is not None:
            file.open("a").close()
    except OSError as error:
        raise ConfigError(variable, f"{file} cannot be written: {error.strerror}") from None


def refuse_unread(reason: str, *names: str) -> None:
    """Refuse those settings of the running command that are given as options beside what makes it not read them.

    Variables hold for many commands, and are no mistake where one does not read them.
    """
    given = click.get_current_context().params
    for name in names:
        if given[name] is not None:
            raise ConfigError(variable_name(name), f"is not read {reason}: leave it out")


def as_given(text: str) -> str:
    """Return a text that the running command prints, with its settings named as its errors name them."""
    return _as_given(click.get_current_context(), text)


@contextmanager
def _named_as_given(ctx: click.Context) -> Iterator[None]:
    """Let errors name a setting by its variable where that is set and the option is not given, else by its option."""
    try:
        yield
    except UnknownVariableError:
        # A misspelt variable is compared with variables.
        raise
    except HeadraceError as error:
        error.args = (_as_given(ctx, str(error)),)
        raise


def _as_given(ctx: click.Context, text: str) -> str:
    # The last name of an option is its short one: --model of --model-name.
    flags = {
        variable: option.opts[-1]
        for option in ctx.command.params
        if (variable := variable_of(option)) is not None
        and (ctx.params.get(option.name or "") not in (None, ()) or variable not in os.environ)
    }
    return _VARIABLE.sub(lambda found: flags.get(found[0], found[0]), text)


def _facts(field: dataclasses.Field[Any], constraint: Constraint) -> list[str]:
    facts = []
    if constraint.secret:
        facts.append(f"{file_variable(variable_name(field.name))} names a file with it")
    has_default = field.default is not dataclasses.MISSING and field.default is not None
    if has_default and not constraint.secret:
        facts.append(f"default {field.default}")
    if constraint.minimum is not None and constraint.maximum is not None:
        facts.append(f"{shown_bound(constraint.minimum)} to {shown_bound(constraint.maximum)}")
    elif constraint.minimum is not None:
        facts.append(f"at least {shown_bound(constraint.minimum)}")
    elif constraint.maximum is not None:
        facts.append(f"at most {shown_bound(constraint.maximum)}")
    return facts
