"""Records what Triton would compile for a GPU that is not here: the specialisation keys of all launches of a worker.

Kernels are neither compiled nor run, and the other operations of a step compute on zeros: nothing but shapes, types,
alignments and numbers of arguments matters, from which Triton's own binder makes the key. The tests' own process has
the interpreter switched on, so this is a program: `python -m tests.gpu_worker.start.launch_keys CASE DRAFTS OUTPUT`.
It writes how many keys the start of a worker used, and those that were new while it served.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Before anything takes it from there: all operations but the kernels of the GPU are those of torch.
import kernels.cpu_library

kernels.cpu_library.cpu_library = lambda: None

from gpu_worker.core.batch_sequences import BatchSequence  # noqa: E402
from gpu_worker.core.draft import Draft  # noqa: E402
from gpu_worker.core.plan import StepPlan  # noqa: E402
from gpu_worker.core.plan_writer import PlanWriter  # noqa: E402
from gpu_worker.core.sequence import Sequence  # noqa: E402
from gpu_worker.core.step import ScheduledSequence  # noqa: E402
from gpu_worker.engine.engine import Engine  # noqa: E402
from gpu_worker.execution.batch.graphs import StepGraphs  # noqa: E402
from gpu_worker.execution.batch.transfers import Upload  # noqa: E402
from gpu_worker.execution.drafts.proposer import DraftRequest  # noqa: E402
from gpu_worker.execution.runner import TorchModelRunner  # noqa: E402
from gpu_worker.start.config import WorkerConfig  # noqa: E402
from gpu_worker.start.engine_setup import build_engine  # noqa: E402
from gpu_worker.text.model_directory import read_model_directory  # noqa: E402
from gpu_worker.text.tokenizer import ModelTokenizer  # noqa: E402
from kernels.gpu_config import Gpu, GpuGeneration  # noqa: E402
from kernels.linear import LinearFactory  # noqa: E402
from kernels.linear.forms import SCALE_BLOCK, DenseWeight, GroupQuantizedWeight, ScaledWeight  # noqa: E402
from kernels.linear.forms.numbers import INT4  # noqa: E402
from ops.bench.make_model import Shape, make_model  # noqa: E402
from ops.bench.spec.fixed_depth import FixedDepth  # noqa: E402
from shared.sampling import Sampling  # noqa: E402
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT  # noqa: E402
from tests.gpu_worker.models.families.random_models import SIZES, save_case  # noqa: E402
from tests.gpu_worker.start.test_speculation_on_device import DEMO_MODEL, MB, Machine  # noqa: E402
from tests.kernels.syncs_forbidden import SyncsForbidden  # noqa: E402

GPU = Gpu(GpuGeneration.HOPPER, 132)
MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN, NUM_DRAFTS = 34, 160, 256, 3
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=0.7, min_p=0.1, logprobs=3),
    Sampling(temperature=0.7, frequency_penalty=0.3, logit_bias={3: 1.0, 7: 2.0}),
    Sampling(temperature=0.7, top_p=0.5, presence_penalty=0.3, repetition_penalty=1.2, prompt_logprobs=1),
]


class Recorder:
    """Stands for the driver of a GPU and for the launches of all kernels.

    Attributes:
        keys: Of the launches so far, as text.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        triton.runtime.driver.set_active(self)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def record(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        options = {"debug": function.debug, "instrumentation_mode": ""} | kwargs
        binder = function.device_caches[0][4]
        _, specialization, used = binder(*args, **options)
        self.keys.add(f"{function.__name__} {specialization} {used}")


class RandomDrafts:
    """Drafts of random sizes, up to the number asked for."""

    wants_hidden = False

    def __init__(self) -> None:
        self._random = random.Random(1)

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        return [Draft((1,) * self._random.randint(0, request.num_tokens)) for request in requests]

    def observe(self, computed: object) -> None:
        pass

    def forget(self, sequence: BatchSequence) -> None:
        pass


def launch_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each operation launch its kernels, which write zeros."""
    from kernels.activation.triton_kernel import gated_triton
    from kernels.paged_attention import triton_attention as attention
    from kernels.rms_norm.triton_kernel import rms_norm_triton
    from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton
    from kernels.sampling import triton_kernel as sampling
    from kernels.sampling.config import sampling_config

    def attend(
        query: Any, cache: Any, tables: Any, starts: Any, lens: Any, most: int, _: int, options: Any, partial: Any
    ) -> torch.Tensor:
        assert (options.sinks, options.chunk_size, partial) == (None, None, None)
        batch = attention.PagedAttentionBatch(query, cache, tables, starts, lens, options)
        return attention.paged_attention_triton(batch, most, GPU).zero_()

    choose = attention.choose_num_chunk_splits
    # Contexts are short here, and chunks divide long ones.
    monkeypatch.setattr(
        attention,
        "choose_num_chunk_splits",
        lambda config, *sizes: choose(replace(config, min_split_tokens=64), *sizes),
    )
    # The parts of an allocation for each tile of each row begin anywhere.
    one_tile = replace(sampling_config(GPU.generation), tile=4096)
    operations: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda *args: rms_norm_triton(*args).zero_(),
        "rope_kv_write": rope_kv_write_triton,
        "paged_attention": attend,
        "apply_penalties": sampling.apply_penalties_triton,
        "count_tokens": sampling.count_tokens_triton,
        "sample_tokens": lambda *args, may_truncate, marks: sampling.sample_tokens_triton(
            *args, may_truncate, one_tile, marks
        ).zero_(),
    }
    launch_mixtures_and_states(monkeypatch)
    monkeypatch.setattr(
        "kernels.activation.dispatch.gated_reference", lambda rows, activation: gated_triton(rows, activation).zero_()
    )
    rooms = {"apply_penalties": "sampling", "count_tokens": "sampling", "sample_tokens": "sampling"}
    for name, operation in operations.items():
        monkeypatch.setattr(f"kernels.{rooms.get(name, name)}.dispatch.{name}_reference", operation)
    monkeypatch.setattr("kernels.layer_cache.can_transpose", lambda *_: False)  # keys lie as on a GPU
    upload = Upload.__init__

    def copy(self: Upload, device: torch.device, *, is_copied: bool | None = None) -> None:
        upload(self, device, is_copied=True)

    monkeypatch.setattr(Upload, "__init__", copy)


def launch_mixtures_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do so for the operations of experts and recurrent layers; all tokens go to the first experts."""
    from kernels.causal_conv.triton_kernel import causal_conv_triton
    from kernels.gated_delta.triton_kernel import gated_delta_triton
    from kernels.moe import gpu, triton_route
    from kernels.ssd.triton_kernel import ssd_triton

    route, combine = triton_route.route_triton, gpu.combine

    def choose(logits: torch.Tensor, rule: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(logits, rule)
        return ids.copy_(torch.arange(ids.shape[1])), weights.zero_()

    for room in ("dispatch", "layers"):
        monkeypatch.setattr(f"kernels.moe.{room}.has_kernels", lambda _: True)
    monkeypatch.setattr("kernels.moe.layers.gpu_of", lambda _: GPU)
    monkeypatch.setattr("kernels.moe.layers.has_float8", lambda _: True)
    monkeypatch.setattr(triton_route, "route_triton", choose)
    monkeypatch.setattr(gpu, "combine", lambda *args: combine(*args).zero_())
    for name, launch in (("gated_delta", gated_delta_triton), ("ssd", ssd_triton)):
        monkeypatch.setattr(
            f"kernels.{name}.dispatch.{name}_chunked", lambda *args, launch=launch: launch(*args, GPU).zero_()
        )
    monkeypatch.setattr(
        "kernels.causal_conv.dispatch.causal_conv_reference",
        lambda *args, has_silu: causal_conv_triton(*args, has_silu=has_silu).zero_(),
    )


def expand_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let prompts of latent attention make keys and values; return how many tokens did, call by call."""
    from gpu_worker.layers import latent_attention
    from kernels.paged_attention import expanded, triton_attention

    lengths: list[int] = []

    def attend(*args: Any, in_chunks: bool) -> torch.Tensor:
        lengths.append(len(args[0]))
        batch = triton_attention.PagedAttentionBatch(*args[:5], args[7])
        return triton_attention.paged_attention_triton(batch, args[5], GPU, in_chunks=in_chunks).zero_()

    monkeypatch.setattr(latent_attention.LatentShape, "can_expand", lambda *_: True)
    monkeypatch.setattr(expanded, "FEWEST_EXPANDED", 42)
    monkeypatch.setattr(expanded, "paged_attention", attend)
    return lengths


def quantize_all(monkeypatch: pytest.MonkeyPatch, form: Callable[[torch.Tensor], Any]) -> None:
    """Let each linear layer have weights of a form, on the kernels of a GPU."""
    from kernels.linear.gpu_packed import triton_dequantize, triton_product
    from kernels.linear.gpu_scaled import triton_product as scaled_product

    for module in ("gpu_packed.pack", "gpu_scaled.matrix"):
        monkeypatch.setattr(f"kernels.linear.{module}.has_kernels", lambda _: True)
    monkeypatch.setattr("kernels.linear.gpu_scaled.matrix.has_float8", lambda _: True)
    for module in ("linear.gpu_packed", "linear.gpu_scaled"):
        monkeypatch.setattr(f"kernels.{module}.dispatch.gpu_of", lambda _: GPU)
    for module, name in (
        (triton_product, "packed_linear_triton"),
        (triton_dequantize, "dequantize_triton"),
        (scaled_product, "scaled_linear_triton"),
    ):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, launch=launch: launch(*args).zero_())
    make = LinearFactory.make

    def make_quantized(self: LinearFactory, weight: Any, bias: Any = None) -> Any:
        weight = weight.weight if isinstance(weight, DenseWeight) else weight
        return make(self, form(weight) if isinstance(weight, torch.Tensor) else weight, bias)

    monkeypatch.setattr(LinearFactory, "make", make_quantized)


def quantize_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experts have float8 in blocks."""
    from kernels.moe import layers
    from kernels.moe.expert_weights import ExpertWeights

    stack = layers.stack_experts

    def stack_quantized(weights: ExpertWeights, *, is_gated: bool) -> Any:
        forms = [fp8_blocks(form.weight) for form in weights.forms if isinstance(form, DenseWeight)]
        return stack(replace(weights, forms=forms), is_gated=is_gated)

    monkeypatch.setattr(layers, "stack_experts", stack_quantized)


def int4(weight: torch.Tensor) -> GroupQuantizedWeight:
    rows, columns = weight.shape
    scales = torch.ones(rows, -(-columns // 64))
    return GroupQuantizedWeight(torch.zeros(rows, columns // 2, dtype=torch.uint8), INT4, 64, scales, scales.clone())


def int8(weight: torch.Tensor) -> ScaledWeight:
    return ScaledWeight(torch.zeros(weight.shape, dtype=torch.int8), torch.ones(weight.shape[0], 1), "dynamic")


def fp8_blocks(weight: torch.Tensor) -> ScaledWeight:
    rows, columns = (-(-size // SCALE_BLOCK) for size in weight.shape)
    return ScaledWeight(torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.ones(rows, columns), "dynamic")


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {"int4": int4, "int8": int8, "fp8-blocks": fp8_blocks}
CASES: dict[str, dict[str, Any]] = {
    "off": {},
    "eager": {"cuda_graphs": "off"},
    "int8-cache": {"kv_cache_dtype": "int8"},
    **{form: {} for form in FORMS},
    **{kind: {"speculative": kind} for kind in ("ngram", "draft", "eagle")},
    "eagle3": {"speculative": "eagle"},
    **{kind: {} for kind in ("mixture", "fp8-mixture", "hybrid", "latent", "expanded")},
    **{f"{kind}-eager": {"cuda_graphs": "off"} for kind in ("mixture", "fp8-mixture", "hybrid", "expanded")},
    **{f"{kind}-decode": {"cuda_graphs": "decode"} for kind in ("dense", "mixture", "hybrid", "expanded")},
}
# Latent attention whose prompts make keys and values from 42 tokens on, of heads of 16 bytes times a whole number.
EXPANDED = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
SMALL = Shape(512, 64, 96, 4, 4, 2, is_tied=False, max_len=MAX_LEN)


def make_case(case: str, directory: Path) -> Path:
    """Return the model of a case: the demo model, or one of another kind made in `directory`."""
    kind = case.removesuffix("-eager").removesuffix("-decode")
    if kind in ("latent", "expanded"):
        # Its tokenizer is that of a model with as many tokens.
        make_model(replace(SMALL, vocab_size=SIZES["vocab_size"]), directory)
        lite = LATENT["deepseek-v2-lite"]
        save_case(replace(lite, options=lite.options | EXPANDED) if kind == "expanded" else lite, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    elif kind == "hybrid":
        make_model(replace(SMALL, attends_every=2), directory)
    elif kind == "mixture":
        make_model(replace(SMALL, num_experts=4), directory)
    elif kind == "fp8-mixture":
        # Of several blocks, so that scales are not one a row.
        make_model(
            replace(SMALL, num_experts=4, hidden_size=2 * SCALE_BLOCK, intermediate_size=2 * SCALE_BLOCK), directory
        )
    else:
        return DEMO_MODEL
    return directory


def start(case: str, drafts: Path, model: Path) -> Engine:
    settings = dict(CASES[case])
    if settings.get("speculative") in ("draft", "eagle"):
        settings["draft_model"] = DEMO_MODEL if case == "draft" else drafts / case
    directory = read_model_directory(model)
    config = WorkerConfig(
        model=model,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        gpu_memory_utilization=1.0,
        num_speculative_tokens=NUM_DRAFTS,
        **settings,
    )
    return build_engine(config, directory, ModelTokenizer(directory)).engine


def steps_of_every_size(runner: TorchModelRunner, num_drafts: int = 0) -> Iterator[StepPlan]:
    """Yield batches of every size with every sampling, decodes and chunks, and lets their sequences depart."""
    lengths = [1, 2, 3, 5, 16, 33, 64, 100, MAX_TOKENS - MAX_NUM_SEQS * (1 + num_drafts)]
    for count, sampling, length in itertools.product(range(1, MAX_NUM_SEQS + 1), SAMPLINGS, lengths):
        if length > 1 and sampling is not SAMPLINGS[count % len(SAMPLINGS)]:
            continue
        scheduled = []
        for place in range(count):
            size = length if place == count // 2 else 1
            blocks = list(range(-(-(size + num_drafts) // runner.block_size)))
            sequence = Sequence(str(place), [1] * size, size, sampling, 4, block_table=blocks)
            is_decode = size == 1 and place % 5 != 4
            scheduled.append(ScheduledSequence(sequence, 0, size, place % 5 != 4, num_drafts if is_decode else 0))
        # Decodes first, as a scheduler has them.
        scheduled.sort(key=lambda item: item.num_tokens > 1 or not item.samples)
        yield PlanWriter().write_any(scheduled)
        runner.clear()


def chunks_behind_contexts(runner: TorchModelRunner) -> Iterator[StepPlan]:
    """Yield chunks of a prompt behind contexts of many lengths, alone and beside a decode."""
    for length, before, count in itertools.product(range(1, MAX_TOKENS, 9), range(0, MAX_LEN - 1, 37), (1, 2)):
        size = min(length, MAX_LEN - before)
        sequences = [
            Sequence(str(place), [1] * total, total, SAMPLINGS[0], 4, block_table=list(range(-(-total // 16))))
            for place, total in enumerate([2, before + size][-count:])
        ]
        scheduled = [ScheduledSequence(sequence, 1, 1, True) for sequence in sequences[:-1]]
        yield PlanWriter().write_any([*scheduled, ScheduledSequence(sequences[-1], before, size, True)])
        runner.clear()


def serve(engine: Engine) -> None:
    """Let sequences arrive one a step until there are as many as may run, and end one by one."""
    for index in range(MAX_NUM_SEQS + 4):
        prompt, sampling = [1 + index] * (1 + index * 7 % 90), SAMPLINGS[index % len(SAMPLINGS)]
        engine.add(Sequence(str(index), prompt, len(prompt), sampling, 60 + index))
        engine.step()
    while engine.has_work():
        engine.step()
        assert engine.last_error is None


def forbid_waits_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a captured step fail whose operations' shapes depend on values."""
    capture = StepGraphs._capture

    def checked(self: StepGraphs, *args: Any) -> Any:
        launch = capture(self, *args)
        with SyncsForbidden():
            launch()
        return launch

    monkeypatch.setattr(StepGraphs, "_capture", checked)


def main(case: str, drafts: str, output: str) -> None:
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: recorder.record(self, *args, **kwargs))
        monkeypatch.setattr("gpu_worker.start.engine_setup.AdaptiveDepth", lambda depth, **_: FixedDepth(depth))
        launch_as_on_a_gpu(monkeypatch)
        forbid_waits_while_capturing(monkeypatch)
        if case in FORMS:
            quantize_all(monkeypatch, FORMS[case])
        if case.startswith("fp8-mixture"):
            quantize_experts(monkeypatch)
        expanded = expand_prompts(monkeypatch) if "expanded" in case else []
        machine = Machine(monkeypatch, 400 * MB)
        engine = start(case, Path(drafts), make_case(case, Path(output).with_name("model")))
        compiled = set(recorder.keys)
        runner = machine.runners[0]
        serve(engine)
        runner.clear()
        num_warmed = len(expanded)
        for plan in itertools.chain(steps_of_every_size(runner), chunks_behind_contexts(runner)):
            runner.submit(plan).result()
        if "speculative" in CASES[case]:
            runner.verify_drafts_of(RandomDrafts())
            for plan in steps_of_every_size(runner, NUM_DRAFTS):
                runner.submit(plan).result()
    new = sorted(recorder.keys - compiled)
    kernels_launched = sorted({key.split()[0] for key in compiled})
    found = {"kernels": kernels_launched, "num_compiled": len(compiled), "new": new}
    Path(output).write_text(json.dumps(found | {"num_expanded": len(set(expanded[num_warmed:]))}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
