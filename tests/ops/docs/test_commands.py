"""Every command in the documentation is run, or says why a test cannot run it and is still one that there is."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from ops.cli.group import headrace
from tests.architecture.source import ROOT
from tests.ops.deploy.machine import can_make_machines
from tests.ops.docs.blocks import PAGES, REASONS, Block, blocks
from tests.ops.docs.page_run import run_page

ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in ALL if block.is_command]
PAGES_THAT_RUN = [page for page in PAGES if any(block.is_run for block in blocks(page))]
_PATH = re.compile(r"(?<![\w/.$-])(?:ops|tests|gateway|gpu_worker|shared|kernels)/[\w./-]+")


def test_every_command_is_run_or_says_why_not() -> None:
    unmarked = [str(block) for block in COMMANDS if not block.is_run and block.reason not in REASONS]
    assert unmarked == []


def test_every_mark_belongs_to_a_command_or_to_what_it_prints() -> None:
    for page in PAGES:
        marks = re.findall(r"^<!-- ((?:not )?run.*|prints) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert marks == [block.mark for block in blocks(page) if block.mark], page


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_headrace_commands_and_their_options_exist(block: Block) -> None:
    for words in _headrace_commands(block):
        command: click.Command | None = headrace
        ctx = click.Context(headrace, info_name="headrace", resilient_parsing=False)
        while isinstance(command, click.Group):
            # Options of a group, and their values, may stand before the name.
            name = next((word for word in words if word in command.list_commands(ctx)), "")
            command, words = command.get_command(ctx, name), words[words.index(name) + 1 :] if name else words
        assert command is not None, f"{block}: {words}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used - known - {"--help"} == set(), f"{block}: {words}"


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_paths_of_the_repository_exist(block: Block) -> None:
    assert [path for path in _PATH.findall(block.text) if not (ROOT / path.rstrip("./")).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_make_machines(), reason="needs Linux namespaces with a network between them")
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.name)
def test_commands_of_a_page_work_as_they_are_written(page: Path, tmp_path: Path) -> None:
    page_blocks = list(blocks(page))
    for tool in ("kubectl", "openssl"):
        if shutil.which(tool) is None and any(f"{tool} " in block.text for block in page_blocks if block.is_run):
            pytest.skip(f"needs {tool}")
    run_page(page_blocks, tmp_path)


def _headrace_commands(block: Block) -> list[list[str]]:
    """Return the words after each `headrace` that begins a command; groups' own options are left out."""
    if block.language == "python":
        return []
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in re.split(r"[|;&]+(?![^'\"]*['\"]\s)", line.split(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("sudo", "exec", "time")):
                words = words[1:]
            if words and words[0].rpartition("/")[2] == "headrace" and len(words) > 1 and words[1] != "--version":
                found.append(words[1:])
    return found
