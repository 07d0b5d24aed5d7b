"""Options of other servers: advice is about none that we have, names only what there is, and reaches who types one."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import ops
from ops.cli.gateway import command as gateway
from ops.cli.other_options import _ROWS, OTHERS, explain
from ops.cli.up import command as up
from ops.cli.worker import command as worker

PAGES = Path(ops.__file__).parent / "docs"
# What the documentation of the others names first; none of it may be without an answer.
WELL_KNOWN = """
-tp -pp -dcp --dcp --dcp-size --trust-remote-code --enforce-eager --swap-space --mem-fraction-static --context-length
--disable-radix-cache --speculative-config --enable-lora -ngl -c --ctx-size -np -fa -hf --mlock --n-gpu-layers --jinja
--temp --lora -t --num-shard --quantize --model-id --gpu --cpu
"""


def _options(*commands: click.Command) -> set[str]:
    return {name for command in commands for option in command.params for name in option.opts + option.secondary_opts}


def _explained(option: str, command: click.Command) -> str | None:
    return explain(option, command.name or "", _options(command))


def test_advice_is_for_options_that_up_and_worker_lack_each_once() -> None:
    assert _options(up, worker) & OTHERS.keys() == set()
    assert len(OTHERS) == sum(len(names.split()) for _, _, names in _ROWS)


def test_advice_names_options_that_there_are() -> None:
    named = {name for _, text in OTHERS.values() for name in re.findall(r"--[a-z][a-z-]+", text)}
    assert named - _options(up, worker, gateway) == set()


def test_pages_that_advice_names_exist() -> None:
    named = {name for _, text in OTHERS.values() for name in re.findall(r"ops/docs/([\w-]+\.md)", text)}
    assert {"two-hosts.md", "gpu-fleet.md"} <= named
    assert [name for name in named if not (PAGES / name).exists()] == []


@pytest.mark.parametrize("command", [up, worker, gateway], ids=lambda command: str(command.name))
def test_every_option_of_other_servers_is_answered(command: click.Command) -> None:
    own = _options(command)
    assert [name for name in OTHERS.keys() - own if _explained(name, command) is None] == []


def test_well_known_options_are_in_the_table() -> None:
    assert set(WELL_KNOWN.split()) <= OTHERS.keys()


@pytest.mark.parametrize(
    ("option", "command", "told"),
    [
        ("--trust_remote_code", up, "No such option '--trust_remote_code' (vLLM's): code of a checkpoint is never run"),
        ("--model-path", up, "No such option '--model-path' (SGLang's): use --model."),
        ("--model-path", gateway, "No such option '--model-path' (SGLang's): `headrace up` has --model."),
        ("--no-mmap", worker, "No such option '--no-mmap' (llama.cpp's): this is chosen by itself: leave it out."),
        ("--no-enable-chunked-prefill", up, "(vLLM's): this is always on: leave it out."),
        ("--model", gateway, "of `headrace gateway`; `headrace up` and `headrace worker` have it."),
        ("--port", worker, "of `headrace worker`; `headrace up` and `headrace gateway` have it."),
        ("--gpu", worker, "No such option '--gpu': use --device cuda;"),
    ],
)
def test_who_types_another_servers_option_is_told_what_stands_for_it(
    option: str, command: click.Command, told: str
) -> None:
    assert told in (_explained(option, command) or "")


def test_an_option_that_is_misspelt_or_like_no_other_is_left_to_click() -> None:
    assert [_explained(option, up) for option in ("--xyzzy", "--wrokers", "--max_model_len")] == [None] * 3
