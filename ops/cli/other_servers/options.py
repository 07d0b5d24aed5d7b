"""Explains options that a command does not have: what stands for them here.

Such an option is looked up in three places: among the options of other servers and synonyms of our own, among the
options of our other commands, and among the options of this command with similar names.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Iterator
from functools import cache

import click

from ops.cli.other_servers.llama_cpp import ROWS as LLAMA_CPP
from ops.cli.other_servers.ollama import ROWS as OLLAMA
from ops.cli.other_servers.sglang import ROWS as SGLANG
from ops.cli.other_servers.synonyms import ROWS as SYNONYMS
from ops.cli.other_servers.tgi import ROWS as TGI
from ops.cli.other_servers.vllm import ROWS as VLLM

SERVERS = (("vLLM", VLLM), ("SGLang", SGLANG), ("llama.cpp", LLAMA_CPP), ("TGI", TGI), ("Ollama", OLLAMA))
_SERVERS = ("up", "worker", "gateway")
_COMMANDS = (*_SERVERS, "chat", "publish")
_LIKENESS = 0.6
# A name as similar as this was misspelt.
_CERTAIN = 0.85
_SHOWN = 3


def rows() -> Iterator[tuple[str | None, str, str]]:
    """Yield the server that has an option (None for a synonym), its name, and what stands for it here."""
    for owner, table in (*SERVERS, (None, SYNONYMS)):
        for advice, names in table:
            for name in names.split():
                yield owner, name, advice


@cache
def _table() -> dict[str, tuple[str | None, str]]:
    return {name: (owner, advice) for owner, name, advice in rows()}


def explain(option: str, command: str, known: Collection[str]) -> str | None:
    """Return what to say of an option that a command does not have, beginning with "No such option"; None if nothing.

    Args:
        option: As it was typed, without its value.
        command: The name of the command.
        known: The options that the command has.
    """
    name = option.replace("_", "-") if option.startswith("--") else option
    if name in known:
        return f"No such option '{option}'. {did_you_mean([name])}"
    # What a server's option is to `chat` is one of its own: `--temp`, `--max-new-tokens`.
    if command not in _SERVERS and (near := nearest(name, known)):
        return f"No such option '{option}'. {did_you_mean(near)}"
    for found in (name, name.replace("--no-", "--", 1)):
        if found in _table():
            return _explanation(option, *_table()[found], known)
    if others := [f"`headrace {other}`" for other in _COMMANDS if other != command and name in _options(other)][:2]:
        has = "has" if len(others) == 1 else "have"
        return f"No such option '{option}' of `headrace {command}`; {' and '.join(others)} {has} it."
    near = nearest(name, known)
    if (meant := _misspelt(name, near)) is not None:
        owner, advice = _table()[meant]
        return (
            f"No such option '{option}'. {did_you_mean([meant])[:-1]}{_whose(owner)}? Here: {_instead(advice, known)}."
        )
    return f"No such option '{option}'. {did_you_mean(near)}" if near else None


def nearest(option: str, known: Iterable[str]) -> list[str]:
    """Return the options whose names are like this one, the most like first, then those that begin like it."""
    if not option.startswith("--"):
        return []
    # Without the dashes, which are alike in all of them.
    word, names = option[2:], sorted(name[2:] for name in known if name.startswith("--"))
    like = difflib.get_close_matches(word, names, _SHOWN, _LIKENESS) if word else []
    parts = set(word.split("-"))
    like += [name for name in names if name not in like and parts <= set(name.split("-"))]
    like += [name for name in names if word and name not in like and name.startswith(word)]
    return [f"--{name}" for name in like[:_SHOWN]]


def nearest_first(error: click.ClickException) -> click.ClickException:
    """Return an error with what was meant in the order of likeness, where click would sort these names by letter."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error
    known = {name for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts}
    near = nearest(error.option_name, known)
    return click.UsageError(f"{error.message} {did_you_mean(near)}", error.ctx) if near else error


def did_you_mean(names: list[str]) -> str:
    """Ask whether one of these names was meant; the nearest stands first."""
    quoted = [f"'{name}'" for name in names]
    return f"Did you mean {' or '.join([', '.join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)}?"


def _misspelt(name: str, near: list[str]) -> str | None:
    """Return the option of another server that was most likely meant, where none of our own is as much like it."""
    if not name.startswith("--"):
        return None
    likeness = max((difflib.SequenceMatcher(None, other[2:], name[2:]).ratio() for other in near), default=0.0)
    foreign = [other[2:] for other in _table() if other.startswith("--")]
    found = difflib.get_close_matches(name[2:], foreign, 1, max(likeness, _CERTAIN))
    return f"--{found[0]}" if found else None


def _explanation(option: str, owner: str | None, advice: str, known: Collection[str]) -> str:
    return f"No such option '{option}'{_whose(owner)}: {_instead(advice, known)}."


def _whose(owner: str | None) -> str:
    return f" ({owner}'s)" if owner else ""


def _instead(advice: str, known: Collection[str]) -> str:
    """Return the advice; one that only names an option says what to do with it, or which command has it."""
    name = advice.split()[0].rstrip(",;:")
    if not name.startswith("--") or "of `headrace" in advice:
        return advice
    if name in known:
        return f"use {advice}"
    return f"`headrace {next(other for other in _COMMANDS if name in _options(other))}` has {advice}"


def _options(command: str) -> set[str]:
    found: click.Command = importlib.import_module(f"ops.cli.{command}").command
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
