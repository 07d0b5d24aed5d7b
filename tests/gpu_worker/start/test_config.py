"""The worker's settings: bounds and error messages, on the command line and before anything is loaded.

Settings of several hosts: which do not go together, and what a launcher's variables mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.start import worker
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.start.host_settings import check_ranks, with_launcher
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.config import resolve
from shared.errors import ConfigError

DEMO_MODEL = Path("ops/demo_model/model")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gpu_memory_utilization", "0", "0.0 is too small; the least allowed is 0.05"),
        ("gpu_memory_utilization", "1.01", "1.01 is too large; the most allowed is 1"),
        ("gpu_memory_utilization", "nan", "must be a finite number, not nan"),
        ("gpu_memory_utilization", "90%", "'90%' is not a number"),
        ("max_model_len", "1", "1 is too small; the least allowed is 2"),
        ("max_num_seqs", "0", "0 is too small; the least allowed is 1"),
        ("max_num_seqs", "8193", "8193 is too large; the most allowed is 8192"),
        ("max_num_batched_tokens", "0", "0 is too small; the least allowed is 1"),
        ("block_size", "0", "0 is too small; the least allowed is 1"),
        ("block_size", "16.5", "'16.5' is not a whole number"),
        ("num_blocks", "0", "0 is too small; the least allowed is 1"),
        ("kv_cache_bytes", "4 apples", "'4 apples' is not a whole number"),
        ("dtype", "int8", "'int8' is not one of auto, float32, bfloat16, float16"),
    ],
)
def test_value_out_of_bounds_names_the_variable_and_what_is_allowed(name: str, value: str, message: str) -> None:
    variable = f"HEADRACE_{name.upper()}"
    for values, environ in (({name: value}, {}), ({}, {variable: value})):
        with pytest.raises(ConfigError) as raised:
            resolve(WorkerConfig, values, environ)
        assert str(raised.value) == f"{variable}: {message}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 10**6},
            r"HEADRACE_MAX_MODEL_LEN: is 1000000, but the model was made for \d+ tokens; lower it",
        ),
        (
            {"max_num_batched_tokens": 100},
            r"HEADRACE_MAX_NUM_BATCHED_TOKENS: max_num_batched_tokens \(100\) must be at least max_num_seqs \(256\)",
        ),
        ({"device": "cuda"}, "HEADRACE_DEVICE: is cuda, but PyTorch finds no CUDA device here"),
        (
            {"draft_model": DEMO_MODEL},
            "HEADRACE_DRAFT_MODEL: is set, but HEADRACE_SPECULATIVE is off; set it to eagle or draft",
        ),
        ({"speculative": "ngram", "simulate": 1.0}, "HEADRACE_SPECULATIVE: is ngram, but a simulated engine has no"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_machine_are_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    from gpu_worker.execution import build

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("loaded"))
    directory = read_model_directory(DEMO_MODEL)
    with pytest.raises(ConfigError, match=message):
        build_engine(WorkerConfig(model=DEMO_MODEL, **settings), directory, ModelTokenizer(directory))


GOOD: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "nnodes": 2,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
    "group_token": "x" * 16,
}


def test_settings_that_go_together_pass() -> None:
    check_ranks(WorkerConfig())
    check_ranks(WorkerConfig(**GOOD))


@pytest.mark.parametrize(
    ("change", "variable", "problem"),
    [
        ({"nnodes": 1}, "HEADRACE_NODE_RANK", "one host"),
        ({"nnodes": 3}, "HEADRACE_TENSOR_PARALLEL_SIZE", "is 4, which 3 hosts cannot share equally"),
        ({"nnodes": 3, "pipeline_parallel_size": 2}, "HEADRACE_TENSOR_PARALLEL_SIZE", "is 4 and .*SIZE is 2, which 3"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 3}, "HEADRACE_PIPELINE_PARALLEL_SIZE", "is 3, which 2"),
        ({"node_rank": 2}, "HEADRACE_NODE_RANK", "is 2; allowed: 0 to 1"),
        ({"master_addr": None}, "HEADRACE_MASTER_ADDR", "is required"),
        ({"group_token": None}, "HEADRACE_GROUP_TOKEN", "at least 16 characters"),
        ({"group_token": "x" * 15}, "HEADRACE_GROUP_TOKEN", "at least 16 characters"),
        ({"node_rank": 0, "master_addr": "0.0.0.0"}, "HEADRACE_MASTER_ADDR", "every network of this host"),
    ],
)
def test_setting_that_does_not_fit_is_named(change: dict[str, Any], variable: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: .*{problem}"):
        check_ranks(WorkerConfig(**GOOD | change))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tensor_parallel_size": 1}, "is 2, which does not divide HEADRACE_TENSOR_PARALLEL_SIZE (1)"),
        ({"tensor_parallel_size": 2, "block_size": 5}, "is 2, which does not divide HEADRACE_BLOCK_SIZE (5)"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_anything_is_read(settings: dict[str, Any], problem: str) -> None:
    """The model is not there, and neither is NATS."""
    with pytest.raises(ConfigError) as raised:
        worker.main(WorkerConfig(model=Path("/nothing/here"), decode_context_parallel_size=2, **settings))
    assert str(raised.value) == f"HEADRACE_DECODE_CONTEXT_PARALLEL_SIZE: {problem}"


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_have_no_tiers(name: str) -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_KV_HOST_BYTES: is 1048576, but several ranks have no tiers"):
        check_ranks(WorkerConfig(kv_host_bytes=1 << 20, **{name: 2}))


def test_draft_model_is_refused_where_ranks_divide_sequences() -> None:
    problem = "HEADRACE_ENABLE_DP_ATTENTION: is set, but a draft model keeps all sequences on rank 0; set --speculative"
    with pytest.raises(ConfigError, match=problem):
        check_ranks(WorkerConfig(tensor_parallel_size=2, enable_dp_attention=True, speculative="draft"))


VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(("more", "port"), [({}, 1234), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 1235)])
def test_variables_of_a_launcher_say_which_host_this_is(more: dict[str, str], port: int) -> None:
    config = with_launcher(WorkerConfig(), VARIABLES | more)
    assert (config.nnodes, config.node_rank, config.master_addr, config.master_port) == (2, 1, "10.0.0.7", port)


def test_options_and_a_world_of_one_come_before_variables() -> None:
    assert with_launcher(WorkerConfig(**GOOD), VARIABLES).master_addr == "10.0.0.1"
    assert with_launcher(WorkerConfig(), VARIABLES | {"WORLD_SIZE": "1"}) == WorkerConfig()
    assert with_launcher(WorkerConfig(), {"RANK": "1"}) == WorkerConfig()


def test_launcher_of_several_processes_a_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE: is 4, .*--nproc-per-node 1"):
        with_launcher(WorkerConfig(), VARIABLES | {"LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="RANK: is 'x', which is not a number"):
        with_launcher(WorkerConfig(), VARIABLES | {"RANK": "x"})
