"""A wheel of the tree serves from `site-packages`, without a clone beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.integration.system import running_system

_NOT_SOURCE = shutil.ignore_patterns(".*", "build", "tests", "*.egg-info", "__pycache__", "node_modules", "results")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of the tree is installed."""
    directory = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, directory / "tree", ignore=_NOT_SOURCE)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(directory / "tree")]
    subprocess.run(build, check=True)
    (wheel,) = directory.glob("headrace-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(directory / "site"), str(wheel)], check=True)
    return directory / "site"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_serves_from_site_packages(site: Path, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    program = "import gateway, ops, kernels; print(gateway.__file__, ops.__file__, kernels.__file__)"
    shown = subprocess.check_output([sys.executable, "-c", program], env=os.environ | environ, cwd=tmp_path, text=True)
    assert all(Path(path).is_relative_to(site) for path in shown.split())
    with running_system(tmp_path, environ=environ) as system:
        answer = system.client().completions.create(
            model=system.model, prompt="def __eq__(self, other):\n    if", max_tokens=12, temperature=0
        )
        assert answer.choices[0].text.startswith(" not isinstance(other")
