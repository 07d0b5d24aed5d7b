"""The settings of a worker of several ranks, or hosts: where they come from, and which do not go together."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.tier_setup import asked_tier
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.ranks.remote import Remote

_MIN_TOKEN = 16

_log = logging.getLogger(__name__)


def with_launcher(config: WorkerConfig, environ: Mapping[str, str]) -> WorkerConfig:
    """Return the settings with what torchrun, or whatever sets its variables, says of the hosts; one process each.

    `ConfigError` if its variables are of several processes a host, or are not numbers.
    """
    if config.nnodes > 1 or not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return config
    nnodes, rank, local = (_number(environ, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"))
    if nnodes == 1:
        return config
    if local > 1:
        problem = f"is {local}, but a worker starts the ranks of its host itself: use torchrun --nproc-per-node 1"
        raise ConfigError("LOCAL_WORLD_SIZE", problem)
    # The launcher listens at its own port for as long as it runs.
    is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number(environ, "MASTER_PORT", config.master_port) + is_taken
    return dataclasses.replace(
        config, nnodes=nnodes, node_rank=rank, master_addr=environ["MASTER_ADDR"], master_port=port
    )


def check_ranks(config: WorkerConfig) -> None:
    """Refuse with `ConfigError` settings of ranks and hosts that do not go together."""
    check_hosts(config)
    _check_balancing(config)
    _check_context(config)
    _check_dp_attention(config)
    if config.num_ranks > 1 and (tier := asked_tier(config)) is not None:
        raise ConfigError(tier[0], f"is {tier[1]}, but several ranks have no tiers below the device's memory yet")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        size, problem = getattr(config, name), None
        if size == 1:
            continue
        if config.simulate is not None:
            problem = "a simulated engine has no model to divide"
        elif config.speculative not in ("off", "ngram", "draft"):
            others = f"ngram and draft go with several ranks yet, not {config.speculative}"
            problem = f"of the proposers of drafts only {others}"
        elif name == "pipeline_parallel_size" and config.speculative != "off":
            problem = f"HEADRACE_SPECULATIVE is {config.speculative}: drafts need a pipeline of one stage"
        if problem is not None:
            raise ConfigError(f"HEADRACE_{name.upper()}", f"is {size}, but {problem}")


def _check_context(config: WorkerConfig) -> None:
    count = config.decode_context_parallel_size
    for name in ("tensor_parallel_size", "block_size"):
        if (number := getattr(config, name)) % count:
            problem = f"is {count}, which does not divide HEADRACE_{name.upper()} ({number})"
            raise ConfigError("HEADRACE_DECODE_CONTEXT_PARALLEL_SIZE", problem)


def _check_dp_attention(config: WorkerConfig) -> None:
    """Refuse settings with which ranks cannot divide sequences among them."""
    if not config.enable_dp_attention:
        return
    problems = {
        "there is one rank; set --tensor-parallel-size": config.tensor_parallel_size == 1,
        "each stage would divide the sequences; leave out --pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "ranks divide either sequences or their tokens; leave out --decode-context-parallel-size": (
            config.decode_context_parallel_size > 1
        ),
        "a draft model keeps all sequences on rank 0; set --speculative to ngram or off": config.speculative == "draft",
        "adapters are not beside attention of some sequences; leave out --max-loras and --lora-modules": bool(
            config.max_loras or config.lora_modules
        ),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError("HEADRACE_ENABLE_DP_ATTENTION", f"is set, but {problem}")


def _check_balancing(config: WorkerConfig) -> None:
    """Refuse settings with which experts cannot move between ranks."""
    if config.num_redundant_experts and not config.enable_eplb:
        problem = f"is {config.num_redundant_experts}, but only --enable-eplb decides which experts are redundant"
        raise ConfigError("HEADRACE_NUM_REDUNDANT_EXPERTS", problem)
    if not config.enable_eplb:
        return
    problems = {
        "there is one rank; set --tensor-parallel-size": config.tensor_parallel_size == 1,
        "experts are divided, not placed; set --enable-expert-parallel": not config.enable_expert_parallel,
        "only rank 0 counts, and it has the layers of one stage; leave out --pipeline-parallel-size": (
            config.pipeline_parallel_size > 1
        ),
        "adapters stay with the experts that they are beside; leave out --max-loras and --lora-modules": bool(
            config.max_loras or config.lora_modules
        ),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError("HEADRACE_ENABLE_EPLB", f"is set, but {problem}")


def check_hosts(config: WorkerConfig) -> None:
    """Refuse with `ConfigError` settings of hosts that do not go together."""
    nnodes = config.nnodes
    if nnodes == 1:
        if config.node_rank:
            raise ConfigError("HEADRACE_NODE_RANK", f"is {config.node_rank}, but --nnodes says that there is one host")
        return
    if config.num_ranks % nnodes:
        raise config.error(f"which {nnodes} hosts cannot share equally")
    if config.node_rank >= nnodes:
        raise ConfigError("HEADRACE_NODE_RANK", f"is {config.node_rank}; allowed: 0 to {nnodes - 1}")
    if config.master_addr is None:
        raise ConfigError("HEADRACE_MASTER_ADDR", "is required with several hosts: the address of host 0")
    if len(config.group_token or "") < _MIN_TOKEN:
        problem = f"needs at least {_MIN_TOKEN} characters with several hosts; the same on each of them"
        raise ConfigError("HEADRACE_GROUP_TOKEN", problem)
    with contextlib.suppress(ValueError):  # a name is not an address
        if config.node_rank == 0 and ipaddress.ip_address(config.master_addr).is_unspecified:
            problem = f"is {config.master_addr}, which is every network of this host; name the address of one"
            raise ConfigError("HEADRACE_MASTER_ADDR", problem)


def _number(environ: Mapping[str, str], name: str, default: int = 1) -> int:
    value = environ.get(name, str(default))
    if not value.isdigit():
        raise ConfigError(name, f"is {value!r}, which is not a number")
    return int(value)


def listen_for_hosts(config: WorkerConfig) -> Remote | None:
    """Listen for the other hosts; None where there are none, `ConfigError` if the address cannot be used."""
    from gpu_worker.execution.ranks.remote import Remote

    if config.nnodes == 1:
        return None
    assert config.master_addr is not None
    assert config.group_token is not None
    try:
        address = socket.gethostbyname(config.master_addr)
        remote = Remote(address, config.master_port, config.group_token, config.nnodes)
    except OSError as error:
        problem = f"{config.master_addr}:{config.master_port} cannot be used on host 0: {error.strerror or error}"
        raise ConfigError("HEADRACE_MASTER_ADDR", problem) from None
    _log.info("waiting for %d hosts at %s:%d", config.nnodes - 1, address, remote.port)
    return remote
