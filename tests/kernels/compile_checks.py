"""Compiles the Triton kernels that a launch would run, for absent GPUs, and reads the result.

A launch is a function that calls an op's host code with CPU tensors; whatever kernels it launches are compiled with
exactly the specialisation that a GPU would see, and not run. The tests' own process has the interpreter switched on,
so the compiler runs in processes of its own: one imports torch and Triton, which takes longer than most kernels, and
forks for each module.

`MODULE.launches(gpu)`, or another function of a module, returns the launches by name.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.gpu_config import Gpu, GpuGeneration, generation_of

NUM_MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}
CAPABILITIES = tuple(NUM_MULTIPROCESSORS)
WRITTEN_FOR = (80, 90)
"""Of `CAPABILITIES`: where no register may spill. The others compile to some registers more or less."""
MAX_TENSOR_COLUMNS = 512
MATRIX_INSTRUCTIONS = {"mma": r"\bmma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma"}
"""In PTX."""
_OF_GENERATION = {GpuGeneration.HOPPER: "wgmma", GpuGeneration.BLACKWELL: "tcgen05"}


def instructions_of(capability: int) -> set[str]:
    """Return what products of 64 rows or more are to use."""
    return {_OF_GENERATION.get(generation_of(*divmod(capability, 10)), "mma")}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that a launch compiled; `stack_bytes` above 0 means registers spilled.

    `tensor_columns` are those of the memory for sums that Blackwell's matrix instructions have.
    """

    launch: str
    kernel: str
    capability: int
    ptx: str
    shared_bytes: int
    num_registers: int
    stack_bytes: int
    num_warps: int
    num_stages: int
    tensor_columns: int

    def __str__(self) -> str:
        return f"{self.launch}-{self.kernel}-sm_{self.capability}"

    @property
    def generation(self) -> GpuGeneration:
        return generation_of(*divmod(self.capability, 10))

    @property
    def matrix_instructions(self) -> set[str]:
        """Return the kinds of matrix instructions that there are: those of the keys of `MATRIX_INSTRUCTIONS`."""
        return {kind for kind, instruction in MATRIX_INSTRUCTIONS.items() if self.count(instruction)}

    def check_fits(self, spilled: int = 0) -> None:
        """Check that the GPU can run it, with at most `spilled` bytes of spilled registers.

        Eight registers more are allowed from compilers that tables were not written by.
        """
        assert self.shared_bytes <= self.generation.max_shared_bytes, str(self)
        assert self.tensor_columns <= MAX_TENSOR_COLUMNS, f"{self} needs more tensor memory than there is: it is a trap"
        if waits := self.count(r"griddepcontrol\.wait"):
            assert waits == 1, str(self)
            begins = self.first(r"(ld|st|atom|red)\.global|cp\.async")
            assert begins > self.first(r"griddepcontrol\.wait"), f"{self} touches memory before its inputs are there"
        allowed = spilled + (0 if self.capability in WRITTEN_FOR else 32)
        assert self.stack_bytes <= allowed, f"{self} spills {self.stack_bytes} bytes of registers"

    def count(self, instruction: str) -> int:
        """Return how often an instruction, a regular expression, stands in the PTX."""
        return len(re.findall(instruction, self.ptx))

    def loads_in_loops(self) -> tuple[int, int]:
        """Return how many loads of the loops' bodies are used in the pass that they belong to, and how many later.

        Copies to shared memory are no such loads. What is loaded ahead is moved to another register for the next pass.
        """
        lines, used, ahead = self.ptx.splitlines(), 0, 0
        for body in _loops(lines):
            for place, line in enumerate(body):
                if loaded := re.search(r"ld\.global\S*\s+\{?([^\[]*?)\}?,\s*\[", line):
                    registers = "|".join(re.findall(r"%\w+", loaded[1]))
                    readers = [each for each in body[place + 1 :] if re.search(rf"({registers})\b", each)]
                    is_moved = all(each.strip().startswith("mov.") for each in readers)
                    used, ahead = used + (not is_moved), ahead + is_moved
        return used, ahead

    def first(self, instruction: str) -> int:
        """Return where an instruction, a regular expression, stands first in the PTX."""
        found = re.search(instruction, self.ptx)
        return len(self.ptx) if found is None else found.start()


def _loops(lines: list[str]) -> list[list[str]]:
    """Return the lines from each label to the last branch back to it."""
    labels = {line.split(":")[0].strip(): place for place, line in enumerate(lines) if re.match(r"\s*\$\w+:", line)}
    ends: dict[int, int] = {}
    for place, line in enumerate(lines):
        if (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) and labels.get(branch[1], place) < place:
            ends[labels[branch[1]]] = place
    return [lines[first:end] for first, end in ends.items()]


def compile_launches(module: str, capabilities: tuple[int, ...], output: Path) -> list[CompiledKernel]:
    """Compile the launches of `MODULE` or `MODULE:FUNCTION` apart from this process; `output` passes the result."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([module, capabilities, str(output)]).encode() + b"\n")
    server.stdin.flush()
    assert server.stdout.readline() == b"0\n", output.read_text() if output.exists() else "the compiler has died"
    return [CompiledKernel(**kernel) for kernel in json.loads(output.read_text())]


@cache
def _server() -> subprocess.Popen[bytes]:
    """The process that compiles for this session; it ends with its standard input."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_checks"]
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    server = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe)
    atexit.register(server.communicate)
    return server


# CUDA's limit of a grid's second and third axis; the first may have 2^31 - 1 programs.
_MAX_LATER_AXES = 65_535


def _serve() -> None:
    """Answer each line of the standard input, `[module, capabilities, output]`, with an exit status in a line."""
    importlib.import_module("torch")
    importlib.import_module("triton.compiler")
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for question in questions:
        module, capabilities, output = json.loads(question)
        child = os.fork()
        if child == 0:
            try:
                _compile_module(module, capabilities, Path(output))
            except BaseException:
                Path(output).write_text(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        answers.write(b"%d\n" % os.waitstatus_to_exitcode(status))


def _compile_module(module: str, capabilities: list[int], output: Path) -> None:
    compiled = []
    name, _, function = module.partition(":")
    launches = getattr(importlib.import_module(name), function or "launches")
    for capability in capabilities:
        gpu = Gpu(generation_of(*divmod(capability, 10)), NUM_MULTIPROCESSORS[capability])
        for name, launch in launches(gpu).items():
            compiled += _compile(name, launch, capability)
    output.write_text(json.dumps([asdict(kernel) for kernel in compiled]))


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
        assert all(size <= _MAX_LATER_AXES for size in grid[1:]), f"{name}: the grid {grid} cannot be launched"
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
        kernel.metadata.num_stages,
        getattr(kernel.metadata, "tmem_size", None) or 0,
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
    _serve()
