"""Each setting reaches the part of the engine that it is for: none is dropped on the way, none taken for another.

Tiers that cannot be are refused before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gpu_worker.core.draft import MAX_DRAFT_TOKENS
from gpu_worker.execution.memory.state_sizes import CHECKPOINT_TOKENS
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.ranks.settings import RankSettings
from gpu_worker.speculative.registry import find_recipe
from gpu_worker.start import engine_setup
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.ended_thread import run_in_ended_thread
from gpu_worker.start.engine_setup import build_engine, check_engine
from gpu_worker.start.proposer_setup import with_room_for_proposer
from gpu_worker.start.tier_setup import build_tiers, check_tiers, made_once
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError
from tests.gpu_worker.execution.tiered_engine import BLOCK, Models
from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, save_letters, save_seeing
from tests.gpu_worker.start.test_speculation_on_device import MB, Machine, generate

DEMO_MODEL = Path("ops/demo_model/model")
# No two are equal, and none is a default.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "block_size": 32,
    "num_blocks": 41,
    "kv_cache_bytes": 1 << 20,
    "gpu_memory_utilization": 0.7,
    "max_num_seqs": 9,
    "max_num_batched_tokens": 77,
    "max_model_len": 101,
    "num_threads": 3,
    "state_checkpoint_ratio": 0.3,
    "cuda_graphs": "decode",
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "enable_dp_attention": True,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "num_redundant_experts": 5,
    "eplb_step_interval": 17,
    "pipeline_parallel_size": 2,
    "nnodes": 2,
}
# Places for adapters go with one rank alone, and with as many as are named at least.
OWN = {"max_loras"}


def test_every_setting_of_the_runner_is_the_workers() -> None:
    config = WorkerConfig(model=DEMO_MODEL, **SETTINGS)
    runner_config, _ = engine_setup._runner_config(config, read_model_directory(DEMO_MODEL))
    names = ({field.name for field in dataclasses.fields(settings)} for settings in (RunnerConfig, WorkerConfig))
    assert set.intersection(*names) == {"model", *SETTINGS, *OWN}
    assert {name: getattr(runner_config, name) for name in SETTINGS} == SETTINGS


def test_what_one_process_computes_is_on_one_host() -> None:
    """A draft model beside ranks of several hosts."""
    ranks = {name: SETTINGS[name] for name in RankSettings().of_ranks()}
    config = RunnerConfig(DEMO_MODEL, **ranks).undivided()
    assert (config, config.ranks_per_host) == (RunnerConfig(DEMO_MODEL), 1)


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "block_size": 16},
        {"tensor_parallel_size": 2, "enable_dp_attention": True},
    ],
)
def test_a_model_that_sees_is_served_for_text_by_stages_and_by_ranks_that_share_tokens(
    ranks: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_seeing(SEEING_CASES["qwen3-vl"], tmp_path)
    save_letters(tmp_path)
    directory = read_model_directory(tmp_path)
    for size in (1, 2):
        config = WorkerConfig(model=tmp_path, tensor_parallel_size=size)
        assert engine_setup._runner_config(config, directory)[0].takes_images
    runner_config, sizes = engine_setup._runner_config(WorkerConfig(model=tmp_path, **ranks), directory)
    assert (runner_config.takes_images, sizes.media) == (False, None)
    assert "the model is served for text alone: there are no images with HEADRACE_PIPELINE_PARALLEL_SIZE" in caplog.text


def test_each_stage_has_places_for_adapters() -> None:
    config = WorkerConfig(model=DEMO_MODEL, pipeline_parallel_size=2, max_loras=2, lora_modules="a=/b")
    assert engine_setup.lora_modules(config) == {"a": Path("/b")}
    runner_config, _ = engine_setup._runner_config(config, read_model_directory(DEMO_MODEL))
    assert (runner_config.max_loras, runner_config.pipeline_parallel_size) == (2, 2)


def test_states_get_no_memory_for_checkpoints_without_a_prefix_cache() -> None:
    config = WorkerConfig(model=DEMO_MODEL, enable_prefix_caching=False)
    assert engine_setup._runner_config(config, read_model_directory(DEMO_MODEL))[0].state_checkpoint_ratio == 0


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (
            {**SETTINGS, "enable_prefix_caching": False, "batch_slowdown": 0.2},
            {
                "block_size": 32,
                "num_blocks": 41,
                "max_num_seqs": 9,
                "max_num_batched_tokens": 77,
                "max_model_len": 101,
                "enable_prefix_caching": False,
                "batch_slowdown": 0.2,
            },
        ),
        # Nothing is loaded here: a longer length than the model's is cut to that.
        ({"max_model_len": 10**6}, {"num_blocks": engine_setup.SIMULATED_NUM_BLOCKS, "max_model_len": 2048}),
    ],
)
def test_sizes_of_a_simulated_engine_are_the_workers(settings: dict[str, Any], sizes: dict[str, Any]) -> None:
    counts = ("tensor_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size", "nnodes")
    lone = {"simulate": 0.01, "enable_eplb": False, "num_redundant_experts": 0, **dict.fromkeys(counts, 1)}
    lone["enable_dp_attention"] = False
    config = WorkerConfig(model=DEMO_MODEL, **{**settings, **lone})
    directory = read_model_directory(DEMO_MODEL)
    scheduler = build_engine(config, directory, ModelTokenizer(directory)).scheduler
    assert {name: getattr(scheduler, name) for name in sizes} == sizes


DIVIDING = {"tensor_parallel_size": 2, "enable_dp_attention": True, "device": "cpu"}
BALANCED = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "device": "cpu"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"enable_eplb": True}, "HEADRACE_ENABLE_EPLB: is set, but there is one rank; set --tensor-parallel-size"),
        ({**BALANCED, "enable_expert_parallel": False}, "experts are divided, not placed; set --enable-expert-par"),
        ({**BALANCED, "pipeline_parallel_size": 2}, "only rank 0 counts, and it has the layers of one stage; leave"),
        ({**BALANCED, "max_loras": 1}, "adapters stay with the experts that they are beside; leave out --max-loras"),
        (
            {"enable_dp_attention": True},
            "HEADRACE_ENABLE_DP_ATTENTION: is set, but there is one rank; set --tensor-par",
        ),
        (
            {**DIVIDING, "pipeline_parallel_size": 2},
            "each stage would divide the sequences; leave out --pipeline-paral",
        ),
        (
            {**DIVIDING, "decode_context_parallel_size": 2},
            "ranks divide either sequences or their tokens; leave out --dec",
        ),
        ({**DIVIDING, "max_loras": 1}, "adapters are not beside attention of some sequences; leave out --max-loras"),
        ({"num_redundant_experts": 2}, "_EXPERTS: is 2, but only --enable-eplb decides which experts are redundant"),
        (BALANCED, "HEADRACE_ENABLE_EPLB: is set, but the model has no experts"),
    ],
)
def test_settings_of_ranks_that_do_not_go_together_are_told(settings: dict[str, Any], problem: str) -> None:
    directory = read_model_directory(DEMO_MODEL)
    with pytest.raises(ConfigError, match=problem):
        check_engine(WorkerConfig(model=DEMO_MODEL, **settings), directory, ModelTokenizer(directory))


def test_every_sequence_gets_a_token_in_a_step_however_many_there_are() -> None:
    directory = read_model_directory(DEMO_MODEL)
    for num_seqs, num_tokens in ((9, engine_setup.CPU_BATCHED_TOKENS), (5000, 5000)):
        config = WorkerConfig(model=DEMO_MODEL, device="cpu", max_num_seqs=num_seqs)
        runner_config, sizes = engine_setup._runner_config(config, directory)
        assert runner_config.max_num_batched_tokens == sizes.max_num_batched_tokens == num_tokens


@pytest.mark.parametrize("wanted", [3, MAX_DRAFT_TOKENS])
def test_runner_has_room_for_as_many_drafts_as_are_asked_for(wanted: int) -> None:
    config = WorkerConfig(model=DEMO_MODEL, speculative="ngram", num_speculative_tokens=wanted, max_num_seqs=9)
    assert with_room_for_proposer(config, RunnerConfig(DEMO_MODEL)).max_draft_tokens == wanted
    recipe = find_recipe("ngram")
    assert recipe is not None
    policy = engine_setup._policy(config, recipe)
    assert policy._max_depth == wanted


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="HEADRACE_DEVICE: is cuda, but PyTorch finds no CUDA device"):
        engine_setup._device(WorkerConfig(model=DEMO_MODEL, device="cuda"))
    assert engine_setup._device(WorkerConfig(model=DEMO_MODEL, device="auto")) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_setup._device(WorkerConfig(model=DEMO_MODEL, device="auto")) == "cuda"
    assert engine_setup._device(WorkerConfig(model=DEMO_MODEL, device="cpu")) == "cpu"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"simulate": 1.0}, "a simulated engine keeps no keys and values"),
        ({"enable_prefix_caching": False}, "HEADRACE_ENABLE_PREFIX_CACHING turns off"),
        ({"kv_host_bytes": 1 << 60}, "bytes of memory are wanted, and "),
    ],
)
def test_tiers_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    config = WorkerConfig(**{"model": Path("x"), "kv_host_bytes": 1 << 20, **settings})
    with pytest.raises(ConfigError, match=problem):
        check_tiers(config)


def test_without_tiers_nothing_is_refused() -> None:
    check_tiers(WorkerConfig(model=Path("x"), simulate=1.0, tensor_parallel_size=2))


@pytest.mark.parametrize(("name", "tokens"), [("gemma3", [BLOCK, BLOCK]), ("qwen3_5", [BLOCK, CHECKPOINT_TOKENS])])
def test_files_know_how_much_is_computed_for_a_content_of_each_kind(
    name: str, tokens: list[int], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runner = Models(tmp_path_factory).open(name)
    asked = {"kv_disk_path": str(tmp_path), "kv_host_bytes": 1 << 22}
    assert build_tiers(WorkerConfig(model=Path("x")), runner) is None
    tiers = build_tiers(WorkerConfig(model=Path("x"), **asked), runner)
    assert tiers is not None
    assert tiers._files is not None
    assert tiers._files._tokens == tokens


def test_weights_are_read_once_for_all_tiers() -> None:
    may_end = threading.Event()
    make = Mock(side_effect=lambda: may_end.wait(10) and object())
    get = made_once(make)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(get) for _ in range(2)]
        may_end.set()
    assert made[0].result() is made[1].result()
    assert make.call_count == 1


def test_thread_has_ended_when_the_result_is_there() -> None:
    thread = run_in_ended_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_error_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_ended_thread(lambda: 1 // 0)


def test_model_of_a_gpu_is_built_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, threads = Machine(monkeypatch, 100 * MB), []
    build = machine._build

    def built(*settings: object, **parts: object) -> object:
        threads.append(threading.current_thread())
        return build(*settings, **parts)

    monkeypatch.setattr(machine, "_build", built)
    generate()
    [thread] = threads
    assert thread.name == "build"
    assert not thread.is_alive()
