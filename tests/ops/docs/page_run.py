"""Runs the commands of a page as its reader would: one shell a machine, in a folder that looks like a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from kernels.build import cache_dir
from tests.architecture.source import ROOT
from tests.ops.deploy.machine import Container, Machine
from tests.ops.docs.blocks import Block

BLOCK_TIMEOUT_S = 120.0


class Shell:
    """A shell on one machine; a command that fails in it fails the test."""

    def __init__(self, machine: Machine, host: str, directory: Path) -> None:
        """Start it in a folder like a clone of the repository, with an environment that `make` has made."""
        self._log = directory / "output.log"
        clone = directory / "headrace"
        _make_clone(clone)
        environ = {"HEADRACE_CACHE_DIR": str(cache_dir(os.environ)), "HOME": str(directory), "LANG": "C.UTF-8"}
        self._container = Container(host, ["bash"], environ, {}, self._log)
        self._process = machine.start(self._container, subprocess.PIPE)
        self._number = 0
        self._tell(f"cd {clone}\nfailed=0\ntrap 'failed=1; echo \"failed: $BASH_COMMAND\"' ERR\n")

    def run(self, block: Block) -> str:
        """Run a block and return what it printed.

        Raises:
            AssertionError: A command failed, or it took too long.
        """
        self._number += 1
        before = len(self._output())
        script = block.script
        if block.until is not None:
            self._tell("{\n" + script + "\n} &\n")
            self._wait_for(block, block.until, before)
            return self._output()[before:]
        mark = f"end of block {self._number}"
        self._tell(f"{script}\necho\necho '{mark}:' $failed; failed=0\n")
        self._wait_for(block, f"{mark}: ", before)
        printed, _, status = self._output()[before:].partition(f"{mark}: ")
        assert status[0] == "0", f"{block}\n{block.text}\n{printed[-3000:]}"
        return printed

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _output(self) -> str:
        return self._log.read_text(errors="replace")

    def _wait_for(self, block: Block, words: str, before: int) -> None:
        deadline = time.monotonic() + BLOCK_TIMEOUT_S
        while words not in self._output()[before:]:
            is_waiting = self._process.poll() is None and time.monotonic() < deadline
            assert is_waiting, f"{block}: never printed {words!r}\n{block.text}\n{self._output()[before:][-3000:]}"
            time.sleep(0.05)


def run_page(page_blocks: list[Block], directory: Path) -> None:
    """Run all blocks of a page that can be run, in order, and compare what they print where the page shows it."""
    hosts = list(dict.fromkeys(block.host for block in page_blocks if block.is_run))
    with Machine(directory / "machine", hosts) as machine:
        shells = {}
        for host in hosts:
            (directory / host).mkdir()
            shells[host] = Shell(machine, host, directory / host)
        printed = ""
        try:
            for block in page_blocks:
                if block.is_run:
                    printed = shells[block.host].run(block)
                elif block.mark == "prints":
                    missing = [line for line in block.text.splitlines() if line.strip() not in printed]
                    assert missing == [], f"{block}: {printed[-3000:]}"
        finally:
            for shell in shells.values():
                shell.close()


def _make_clone(clone: Path) -> None:
    """Make a folder whose entries are those of the repository, and an environment as after `make up`'s installation."""
    clone.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for top in {line.split("/")[0] for line in listed.splitlines()}:
        (clone / top).symlink_to(ROOT / top)
    environment = clone / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith("."):
            (environment / entry.name).symlink_to(entry)
    for stamp in (".embedded", ".test", ".dev"):
        (environment / stamp).touch()
