"""Compiles the Triton kernels that a launch would run, for GPUs that are not here, and says what came out.

A launch is a function that calls an op's host code with CPU tensors; whatever kernels it launches are compiled with
exactly the specialisation that a GPU would see, and not run. The tests' own process has the interpreter switched on,
so the compiler runs in a process of its own: `python -m tests.kernels.compile_checks MODULE CAPABILITY... OUTPUT`.

`MODULE.launches(gpu)` returns the launches by name.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.gpu_config import Gpu, GpuGeneration, generation_of

NUM_MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that a launch compiled; `stack_bytes` above 0 means registers spilled."""

    launch: str
    kernel: str
    capability: int
    ptx: str
    shared_bytes: int
    num_registers: int
    stack_bytes: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.launch}-{self.kernel}-sm_{self.capability}"

    @property
    def generation(self) -> GpuGeneration:
        return generation_of(*divmod(self.capability, 10))

    def count(self, instruction: str) -> int:
        """Return how often an instruction, a regular expression, stands in the PTX."""
        return len(re.findall(instruction, self.ptx))


def compile_launches(module: str, capabilities: tuple[int, ...], output: Path) -> list[CompiledKernel]:
    """Compile all launches of a module in a process of their own; `output` is a file to pass the result in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_checks", module, *map(str, capabilities), str(output)]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return [CompiledKernel(**kernel) for kernel in json.loads(output.read_text())]


def _main(module: str, *rest: str) -> None:
    *capabilities, output = rest
    compiled = []
    for capability in map(int, capabilities):
        gpu = Gpu(generation_of(*divmod(capability, 10)), NUM_MULTIPROCESSORS[capability])
        for name, launch in importlib.import_module(module).launches(gpu).items():
            compiled += _compile(name, launch, capability)
    Path(output).write_text(json.dumps([asdict(kernel) for kernel in compiled]))


def _compile(name: str, launch: Callable[[], object], capability: int) -> list[CompiledKernel]:
    """Call a launch with the target set and every kernel compiled instead of run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Target:
        """Stands for the driver of a GPU, as far as compilation asks it."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

    results: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        results.append(_describe(name, kernel, capability))
        return kernel

    triton.runtime.driver.set_active(Target())
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    assert results, f"{name} launched nothing"
    return results


def _describe(launch: str, kernel: Any, capability: int) -> CompiledKernel:
    registers, stack = _resource_usage(kernel.asm["cubin"])
    return CompiledKernel(
        launch,
        kernel.metadata.name,
        capability,
        kernel.asm["ptx"],
        kernel.metadata.shared,
        registers,
        stack,
        kernel.metadata.num_warps,
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes per thread, read by the disassembler that Triton brings."""
    import tempfile

    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage, text
    return int(usage[1]), int(usage[2])


if __name__ == "__main__":
    _main(*sys.argv[1:])
