"""What importing a part pulls in, seen from a fresh interpreter; `make lint` checks the import contracts."""

from __future__ import annotations

from tests.ops.bench.bare_machine import run_without

ML_PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "tokenizers")


def test_gateway_imports_without_any_ml_package() -> None:
    done = run_without((*ML_PACKAGES, "jinja2"), "import gateway.process.gateway")
    assert done.returncode == 0, done.stderr


def test_core_of_the_worker_imports_no_ml_package_and_no_nats() -> None:
    code = "import gpu_worker.core.scheduler, gpu_worker.core.block_pool, gpu_worker.core.prefix_cache"
    done = run_without((*ML_PACKAGES, "nats"), code)
    assert done.returncode == 0, done.stderr


HELP = """
from ops.cli import main
for command in ([], ["up"], ["gateway"], ["worker"], ["chat"], ["keys"]):
    sys.argv = ["headrace", *command, "--help"]
    try:
        main()
    except SystemExit as ending:
        assert not ending.code, command
"""


def test_help_of_every_command_needs_nothing_heavy() -> None:
    heavy = ("torch", "starlette", "nats", "redis", "uvloop", "numpy", "jinja2", "prometheus_client")
    done = run_without(heavy, HELP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: headrace") == 6
