"""Files that the documentation's commands make in a clone, secrets among them, stay out of git."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.ops.docs.blocks import PAGES, blocks

# Where output goes, keys of certificates, folders that are made, and models that are written: paths of the clone alone.
_MADE = re.compile(r"(?:>>? ?|-keyout |mkdir -p |cp -rL \S+ |--out |-sd )(?P<path>[A-Za-z][\w./-]*)")


def made_files() -> dict[str, Path]:
    """Return each path that a command makes in the clone, with the page that says so."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.is_run:
                # A page goes into the folder of its certificates to make them.
                folder = "tls/" if "cd tls" in block.text else ""
                paths = (match["path"] for match in _MADE.finditer(block.text))
                found |= {path if path == "tls" else folder + path: page for path in paths}
    return found


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_commands_make_is_ignored_by_git(tmp_path: Path) -> None:
    # Beside a key file lies the one that its writers lock.
    made = made_files() | {"keys.json.lock": ROOT / "ops/docs/security.md"}
    assert {"mine/first-key", "mine/ca.key", "mine/there/passwords.yaml", "key", "tls/ca.key", "acme.conf"} <= set(made)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for folder in {"tls", "jetstream", "nats-conf", "demo-int8"} & set(made):
        (tmp_path / folder).mkdir()
    given = "\n".join(made)
    done = subprocess.run(["git", "check-ignore", "--stdin"], input=given, capture_output=True, text=True, cwd=tmp_path)
    assert {path: page.name for path, page in made.items() if path not in done.stdout.splitlines()} == {}
