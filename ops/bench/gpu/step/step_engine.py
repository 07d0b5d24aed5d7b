"""The engine on a model that is in memory already: real scheduler, real runner, random prompts, the host's clock."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.execution.memory.state_sizes import num_sure_slots, state_config
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from ops.bench.spec.fixed_depth import FixedDepth
from ops.bench.stepping import SteppedEngine

BLOCK_SIZE = 16
# Steps that are timed together: with steps in flight, single ones begin and end at odd times.
_STEPS_PER_SAMPLE = 8


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the engine is made for.

    Attributes:
        max_num_seqs: Sequences at once, each with blocks for `max_model_len` tokens.
        token_budget: Of a step.
        has_graphs: Decodes are captured in graphs first.
        is_warm: All kernels that any step may need are compiled first, which takes a while.
        has_prefix_cache: Prompts that begin alike share blocks.
        num_drafts: Drafts that each sequence verifies in a step, where there is a proposer.
    """

    max_num_seqs: int
    max_model_len: int
    token_budget: int = 8192
    has_graphs: bool = True
    is_warm: bool = False
    has_prefix_cache: bool = False
    num_drafts: int = 0


class StepEngine(SteppedEngine):
    """An engine whose cache and runner are made for a load, and whose steps are sampled several at once."""

    def __init__(self, model: CausalLM, sizes: EngineSizes, proposer: Proposer | None = None) -> None:
        num_blocks = sizes.max_num_seqs * (-(-sizes.max_model_len // BLOCK_SIZE) + 1)
        self.cache = allocate_kv_cache(num_blocks, BLOCK_SIZE, model.config, model.dtype, model.device)
        # Steps timed on their own read blocks that were never written, and write the results back.
        for tensor in (tensor for stack in self.cache.groups[0].stacks for tensor in (stack.keys, stack.values)):
            tensor.zero_()
        budget = max(sizes.token_budget, sizes.max_num_seqs)
        has_states = model.config.has_states
        runner = TorchModelRunner(
            model,
            self.cache,
            sizes.max_num_seqs,
            sizes.max_model_len,
            budget,
            sizes.num_drafts,
            num_state_slots=num_sure_slots(sizes.max_num_seqs, has_blocks=True) if has_states else 0,
        )
        if sizes.is_warm:
            runner.warm_up()
        if sizes.has_graphs:
            runner.capture_graphs()
        if proposer is not None:
            runner.verify_drafts_of(proposer)
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=sizes.max_model_len,
            enable_prefix_caching=sizes.has_prefix_cache,
            state=state_config(runner.num_state_slots, BLOCK_SIZE) if has_states else None,
        )
        speculation = None if proposer is None else Speculation(FixedDepth(sizes.num_drafts))
        super().__init__(Engine(Scheduler(config, speculation), runner), range(model.config.vocab_size))

    def fill(self, num_seqs: int, prompt_len: int) -> list[Sequence]:
        """Add sequences that go on to the end of the context, and step until all of them decode."""
        sequences = [self.add(self.random_prompt(prompt_len), 1 << 30) for _ in range(num_seqs)]
        self.prefill(sequences)
        return sequences

    def time_steps(self, num_steps: int) -> list[float]:
        """Return the seconds of a step, again and again, while the same sequences decode.

        Raises:
            RuntimeError: A sequence ended meanwhile.
        """
        num_running = self.engine.stats.running
        self.step_seconds(_STEPS_PER_SAMPLE)
        samples = [
            sum(self.step_seconds(_STEPS_PER_SAMPLE)) / _STEPS_PER_SAMPLE
            for _ in range(max(1, num_steps // _STEPS_PER_SAMPLE))
        ]
        if self.engine.stats.running != num_running:
            raise RuntimeError(f"{num_running} sequences were to decode, {self.engine.stats.running} are left")
        return samples

    def time_to_first_token(self, prompt: list[int]) -> float:
        """Return the seconds from adding a prompt to an idle engine to its one token."""
        return self.serve_s([prompt], 1)
