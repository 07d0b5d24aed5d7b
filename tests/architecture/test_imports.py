"""What importing a part pulls in, seen from a fresh interpreter; `make lint` checks the import contracts."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.source import ROOT

ML_PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "tokenizers")

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
"""


def _run(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


def test_gateway_imports_without_any_ml_package() -> None:
    done = _run("import gateway.process.gateway", *ML_PACKAGES, "jinja2")
    assert done.returncode == 0, done.stderr


def test_core_of_the_worker_imports_no_ml_package_and_no_nats() -> None:
    code = "import gpu_worker.core.scheduler, gpu_worker.core.block_pool, gpu_worker.core.prefix_cache"
    done = _run(code, *ML_PACKAGES, "nats")
    assert done.returncode == 0, done.stderr


HELP = """
from ops.cli import main
for command in ([], ["up"], ["gateway"], ["worker"], ["chat"], ["publish"], ["keys"]):
    sys.argv = ["headrace", *command, "--help"]
    try:
        main()
    except SystemExit as ending:
        assert not ending.code, command
"""


def test_help_of_every_command_needs_nothing_heavy() -> None:
    heavy = ("torch", "starlette", "nats", "redis", "uvloop", "numpy", "jinja2", "prometheus_client")
    done = _run(HELP, *heavy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: headrace") == 7
