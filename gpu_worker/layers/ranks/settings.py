"""Among how many ranks a model is divided, and how: settings of a worker, and of the runner of each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from shared.config import setting
from shared.errors import ConfigError


# Without slots, so that settings classes can have it beside other bases.
@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The numbers and kinds of parts; by default one process has the model."""

    tensor_parallel_size: int = setting(
        1,
        "Ranks that the model is divided among: processes on this host, each with a GPU or a part of the CPU's cores, "
        "which compute every step together. Not run on GPUs yet.",
        minimum=1,
        maximum=62,
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages that the model's layers are divided among, each of as many ranks as --tensor-parallel-size says; as "
        "many parts of the running requests are computed at once. Not run on GPUs yet.",
        minimum=1,
        maximum=62,
    )
    decode_context_parallel_size: int = setting(
        1,
        "Ranks among those of --tensor-parallel-size that share the tokens of each sequence: each keeps the keys and "
        "values of some tokens, for the heads of all. Where there are fewer key and value heads than ranks, the KV "
        "cache holds as many times more tokens. Not run on GPUs yet.",
        minimum=1,
        maximum=62,
    )
    enable_dp_attention: bool = setting(
        False,
        "With several ranks: each keeps the keys and values of some sequences alone, and attends for those with all "
        "heads (data-parallel attention); experts and the rest stay divided. --num-blocks and --kv-cache-bytes are of "
        "each rank then, so the KV cache holds as many times more sequences. Not run on GPUs yet.",
    )
    enable_expert_parallel: bool = setting(
        False, "With several ranks: each has some of a model's experts, not some features of each expert."
    )
    enable_eplb: bool = setting(
        False,
        "With --enable-expert-parallel: count the tokens of each expert, and move experts between ranks while steps "
        "are computed, so that all ranks have as much to do. Not run on GPUs yet.",
    )
    num_redundant_experts: int = setting(
        0,
        "With --enable-eplb: places for experts in each layer, over all ranks, beyond one for each; busy experts are "
        "in several places, and each has some of their tokens. Experts and these have to divide among the ranks.",
        minimum=0,
        maximum=4096,
    )
    eplb_step_interval: int = setting(
        3000, "With --enable-eplb: steps after which experts may move again.", minimum=1, maximum=1_000_000
    )
    nnodes: int = setting(
        1,
        "Hosts that the ranks are on, as many on each; start a worker on each host, with its own --node-rank.",
        minimum=1,
    )

    @property
    def num_ranks(self) -> int:
        """Processes that have parts of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_host(self) -> int:
        """How many of them share a host."""
        return self.num_ranks // self.nnodes

    @property
    def num_parts(self) -> int:
        """Parts of the KV blocks, of which each rank has one; 1 where all ranks keep something of each sequence."""
        return self.tensor_parallel_size if self.enable_dp_attention else 1

    @property
    def moved_experts(self) -> int | None:
        """As `num_redundant_experts` of `Ranks`."""
        return self.num_redundant_experts if self.enable_eplb else None

    def of_ranks(self) -> dict[str, Any]:
        """Return these settings by their names."""
        return {item.name: getattr(self, item.name) for item in fields(RankSettings)}

    def undivided(self) -> Self:
        """Return the settings of one process that has all of a model."""
        return replace(self, **RankSettings().of_ranks())

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the settings by which there are several ranks; `problem` follows their values."""
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if tensor == 1 < pipeline:
            return ConfigError("HEADRACE_PIPELINE_PARALLEL_SIZE", f"is {pipeline}, {problem}")
        stages = f" and HEADRACE_PIPELINE_PARALLEL_SIZE is {pipeline}" if pipeline > 1 else ""
        return ConfigError("HEADRACE_TENSOR_PARALLEL_SIZE", f"is {tensor}{stages}, {problem}")
