"""Building a runner on a device whose memory is on paper: every way in which it can be too little, and what is told."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.execution import build
from gpu_worker.execution.build import build_runner, check_fits
from gpu_worker.execution.build_plan import make_plan
from gpu_worker.execution.memory.budget import RESERVE_BYTES
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import Stage, StartUp
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from kernels.cpu_library import cpu_library
from ops.stack.config import DEMO_MODEL
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import MAX_LEN, make_sequence, run
from tests.gpu_worker.execution.fake_memory import MB, FakeMemory
from tests.gpu_worker.models.families.latent_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case

BLOCK = 4
# Two layers, keys and values, 2 heads of 8 float32 numbers.
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 8 * 4


def config(model: Path, **settings: Any) -> RunnerConfig:
    base = {"block_size": BLOCK, "max_num_seqs": 5, "max_num_batched_tokens": 32, "num_threads": 1}
    return RunnerConfig(model, **{**base, **settings})


def test_a_device_gets_a_device_runner_with_all_blocks_that_fit(directory: Path) -> None:
    memory = FakeMemory(RESERVE_BYTES + MB)
    runner = build_runner(config(directory, gpu_memory_utilization=1.0), memory=memory)
    assert runner.num_blocks == MB // BLOCK_BYTES
    sequences = [make_sequence("a", [1, 2, 3], Sampling(temperature=0.0, max_tokens=3))]
    assert len(run(runner, sequences, max_num_seqs=5, token_budget=32).tokens["a"]) == 3


@pytest.mark.parametrize(("cuda_graphs", "num_graphs"), [("off", 0), ("decode", 4), ("all", 6)])
def test_graphs_are_captured_as_set_and_all_of_them_are_measured_first(
    directory: Path, cuda_graphs: str, num_graphs: int
) -> None:
    calls: list[tuple[Stage, int, int]] = []
    settings = {"gpu_memory_utilization": 1.0, "cuda_graphs": cuda_graphs}
    build_runner(
        config(directory, **settings), StartUp(lambda *call: calls.append(call)), FakeMemory(RESERVE_BYTES + MB)
    )
    for stage in (Stage.PROFILE, Stage.CAPTURE):
        counts = [(done, total) for called, done, total in calls if called is stage]
        assert counts == [(done, num_graphs) for done in range(1, num_graphs + 1)]


def test_graphs_of_large_steps_are_measured_with_the_others(tmp_path: Path) -> None:
    """What a model of many small kernels captures more is in the memory line, since the probe captures the same."""
    save_case(CASES["deepseek-v2-lite"], tmp_path)
    calls: list[tuple[Stage, int, int]] = []
    limits = {"max_num_batched_tokens": 1024, "max_model_len": 100, "gpu_memory_utilization": 1.0}
    build_runner(config(tmp_path, **limits), StartUp(lambda *call: calls.append(call)), FakeMemory(RESERVE_BYTES + MB))
    totals = {stage: total for stage, _, total in calls if stage in (Stage.PROFILE, Stage.CAPTURE)}
    # Decodes of 1, 2, 4 and 5 sequences, five sizes up to 512 tokens in batches of 4 and 5, and two beyond in one of 5.
    assert totals == {Stage.PROFILE: 4 + 10 + 2, Stage.CAPTURE: 4 + 10 + 2}


def test_a_cpu_gets_a_runner_that_computes_at_once(directory: Path) -> None:
    runner = build_runner(config(directory, num_blocks=60))
    assert (runner.num_blocks, runner.max_model_len) == (60, MAX_LEN)


def test_whether_a_model_fits_is_told_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunnerConfig(DEMO_MODEL, max_num_seqs=2, max_model_len=64, num_blocks=16)
    expected = check_fits(config)

    def compile_kernels(*_: object) -> Path:
        raise AssertionError("compiles")

    monkeypatch.setattr("kernels.cpu_library.build_library", compile_kernels)
    cpu_library.cache_clear()
    try:
        assert check_fits(config) == expected
    finally:
        cpu_library.cache_clear()


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_expected_of_a_compiler_is_what_it_makes(
    is_there: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", "on" if is_there else "off")
    cpu_library.cache_clear()
    try:
        config = RunnerConfig(directory, max_model_len=64)
        assert make_plan(config, compiles=False).demand == make_plan(config).demand
    finally:
        cpu_library.cache_clear()


def test_stages_follow_one_another_and_each_reaches_its_end(directory: Path) -> None:
    calls: list[tuple[Stage, int, int]] = []
    start_up = StartUp(lambda *call: calls.append(call))
    build_runner(config(directory, gpu_memory_utilization=1.0), start_up, FakeMemory(RESERVE_BYTES + MB))
    stages = [stage for stage, _, _ in calls]
    assert stages == sorted(stages, key=list(Stage).index)
    # Kernels are compiled before a runner is built.
    own = [stage for stage in Stage if stage is not Stage.COMPILE]
    for stage in own:
        counts = [done for name, done, _ in calls if name is stage]
        total = {total for name, _, total in calls if name is stage}
        assert counts == sorted(counts)
        assert {counts[-1]} == total
    assert list(start_up.seconds) == own
    (path,) = directory.glob("*.safetensors")
    assert start_up.loaded_bytes == sum(tensor.nbytes for tensor in load_file(path).values())


def test_where_the_memory_goes_is_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    build_runner(config(directory, gpu_memory_utilization=1.0), memory=FakeMemory(RESERVE_BYTES + MB))
    assert any("KV cache 999 KB = 976 blocks of 4 = 3904 tokens" in message for message in caplog.messages)
    assert any(message.startswith("memory: left free") for message in caplog.messages)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"HEADRACE_MODEL: the weights need \d+ KB in float32, but the device has"):
        build_runner(config(directory), memory=FakeMemory(RESERVE_BYTES + 10_000))
    monkeypatch.setattr(build, "free_host_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"HEADRACE_MODEL: the weights need .* but 10 KB of memory are free"):
        build_runner(config(directory))


def test_cache_that_does_not_fit_is_told_with_a_length_that_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = MB

    def load(*arguments: Any, **keywords: Any) -> CausalLM:
        memory.allocate("weights", weights)
        return load_model(*arguments, **keywords)

    monkeypatch.setattr(build, "load_model", load)
    settings = {"gpu_memory_utilization": 1.0, "dtype": "float32"}
    # One block too few for a sequence of 160 tokens.
    room = RESERVE_BYTES + weights + 39 * BLOCK_BYTES
    memory = FakeMemory(room)
    with pytest.raises(
        ConfigError, match=r"weights 1 MB.* \(160 tokens\) .* lower HEADRACE_MAX_MODEL_LEN to 156, or free"
    ):
        build_runner(config(directory, **settings), memory=memory)
    memory = FakeMemory(room)
    assert build_runner(config(directory, max_model_len=156, **settings), memory=memory).num_blocks == 39


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 5000}, "HEADRACE_NUM_BLOCKS: asks for a KV cache of 5 MB, but 1 MB of .* Lower it to 976"),
        ({"kv_cache_bytes": 3 * MB}, f"HEADRACE_KV_CACHE_BYTES: asks for .* Lower it to {976 * BLOCK_BYTES}"),
    ],
)
def test_set_size_beyond_the_device_is_refused(directory: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_runner(config(directory, **settings), memory=FakeMemory(RESERVE_BYTES + MB))


def test_set_size_within_the_device_is_taken_whatever_the_share(directory: Path) -> None:
    memory = FakeMemory(RESERVE_BYTES + 3 * MB)
    settings = {"gpu_memory_utilization": 0.05, "num_blocks": 300}
    assert build_runner(config(directory, **settings), memory=memory).num_blocks == 300


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("load_model", {}, r"HEADRACE_MODEL: the device ran out of memory while the weights were loaded: .* are free"),
        (
            "TorchModelRunner.warm_up",
            {},
            "HEADRACE_MAX_NUM_BATCHED_TOKENS: .* in the largest step: .* lower HEADRACE_MAX_NUM_BATCHED_TOKENS to 16, "
            "or lower HEADRACE_MAX_NUM_SEQS to 2",
        ),
        ("TorchModelRunner.warm_up", {"max_num_seqs": 32}, r"To make it fit, lower HEADRACE_MAX_NUM_SEQS to 16$"),
        ("allocate_groups", {}, "HEADRACE_MAX_NUM_BATCHED_TOKENS: the device ran out of memory in the largest step"),
    ],
)
def test_running_out_of_memory_is_told_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch, target: str, settings: dict[str, int], message: str
) -> None:
    def exhaust(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(f"gpu_worker.execution.build.{target}", exhaust)
    with pytest.raises(ConfigError, match=message):
        build_runner(config(directory, **settings), memory=FakeMemory(RESERVE_BYTES + MB))


def test_running_out_of_memory_at_the_end_suggests_a_smaller_share(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    allocate = build.allocate_groups

    def exhaust_at_last(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return allocate(*arguments)

    monkeypatch.setattr(build, "allocate_groups", exhaust_at_last)
    with pytest.raises(ConfigError, match=r"To make it fit, lower HEADRACE_GPU_MEMORY_UTILIZATION to 0\.95$"):
        build_runner(config(directory, gpu_memory_utilization=1.0), memory=FakeMemory(RESERVE_BYTES + MB))


def test_number_of_ranks_that_does_not_divide_a_model_is_told_with_those_that_do(directory: Path) -> None:
    told = "HEADRACE_TENSOR_PARALLEL_SIZE: is 3: .* cannot be divided among 3 ranks; numbers that work: 2$"
    with pytest.raises(ConfigError, match=told):
        make_plan(config(directory, tensor_parallel_size=3, device="cpu"))


def test_summary_has_the_parts_and_the_rate_of_loading() -> None:
    ticks = iter((0.0, 1.0, 3.0, 3.0, 3.5, 4.0, 6.0, 6.5))
    start_up = StartUp(clock=lambda: next(ticks))
    with start_up.stage(Stage.LOAD) as progress:
        progress(4_000_000_000, 8_000_000_000)
        progress(8_000_000_000, 8_000_000_000)
    with start_up.stage(Stage.PROFILE):
        pass
    with start_up.stage(Stage.CAPTURE):
        pass
    assert start_up.summary() == "ready in 6.5 s: load 2.0 s (8.00 GB at 4.0 GB/s), profile 0.5 s, capture 2.0 s"


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAKE_A_TENSOR = """
import torch
from gpu_worker.execution.build import ask_for_huge_pages
ask_for_huge_pages()
tensor = torch.ones(16 << 20)
print(open("/proc/self/smaps").read())
"""


@pytest.mark.skipif(
    not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(), reason="the kernel gives no huge pages"
)
def test_large_tensors_get_huge_pages_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", _MAKE_A_TENSOR], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", done.stdout))) > 32 << 10
