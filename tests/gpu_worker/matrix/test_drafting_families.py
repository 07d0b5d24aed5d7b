"""Models with latent vectors, recurrent layers and experts: with every proposer, answers are those of plain decoding.

Requests of every kind meet in each engine: greedy, drawn, guided, of shared prefixes that the cache knows, in chunks,
and preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, Outcome, make_runner, random_prompt, run, save_tiny_model
from tests.gpu_worker.matrix.factors import GRAMMAR
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.recurrent_models import CASES as RECURRENT
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.speculative.mtp.test_head import FAMILIES, SHARP, save_headed
from tests.gpu_worker.speculative.recorder import recorded_runner
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, constraint_of

pytestmark = pytest.mark.slow

HEADLESS = [name for name in RECURRENT if name not in FAMILIES]
MODELS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(save_headed, name) for name in FAMILIES},
    "deepseek-v2-lite": partial(save_case, LATENT["deepseek-v2-lite"]),
    **{name: partial(save_recurrent, name, eos_token_id=None) for name in HEADLESS},
}
# Others are refused at the start: drafts of heads that a checkpoint lacks.
PAIRS = [
    (model, proposer)
    for model in MODELS
    for proposer in ("ngram", "draft", "mtp")
    if proposer != "mtp" or model in FAMILIES
]
NUM_SLOTS = 12
DEPTH = 4


@dataclass(frozen=True)
class Way:
    """How the requests meet."""

    token_budget: int
    arrivals_per_step: int
    num_blocks: int = 400
    caching: bool = True
    kv_cache_dtype: str = "auto"


WAYS = {
    "together": Way(200, 100),
    "in chunks, one after another": Way(19, 1),
    "preempted": Way(60, 3, num_blocks=26),
    "without a cache": Way(40, 2, caching=False),
    "in eight bits": Way(40, 2, kv_cache_dtype="int8"),
}

SHARED = random_prompt(22, seed=1)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "grammar": GRAMMAR},
    {"temperature": 0.0, "logprobs": 1},
]


def sharpen(directory: Path) -> None:
    """Make a few tokens likelier than all others, so that drafts by chance are right now and then."""
    tensors = load_file(directory / "model.safetensors")
    head = tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"]
    head[:SHARP] *= 2
    head[SHARP:] *= 0.3
    save_file(tensors, directory / "model.safetensors")


def prediction_of(answer: list[int], number: int) -> tuple[int, ...]:
    """Return what a client may say about the answer beforehand: most of it is right."""
    generator = random.Random(number)
    return tuple(token if generator.random() < 0.8 else generator.randrange(VOCAB) for token in answer)


def sequences(answers: Mapping[str, list[int]] | None = None) -> list[Sequence]:
    """Make one of each kind with the shared prefix, and one without; who knows the answers predicts them."""
    made = []
    for number, options in enumerate(SAMPLINGS * 2):
        sampling = Sampling(max_tokens=10, seed=number, **options)
        own = random_prompt(1 + 3 * number, seed=number)
        prompt = [*SHARED, *own] if number < len(SAMPLINGS) else own
        constraint = constraint_of(sampling) if sampling.grammar is not None else None
        prediction = () if answers is None else prediction_of(answers[str(number)], number)
        made.append(
            Sequence(
                str(number),
                prompt,
                len(prompt),
                sampling,
                max_tokens=10,
                # What ends a text that is guided, and no other here.
                eos_token_ids=frozenset({EOS}) if constraint is not None else frozenset(),
                constraint=constraint,
                prediction=prediction,
            ),
        )
    return made


def answered(
    runner: Any, way: Way, answers: Mapping[str, list[int]] | None = None, *, has_states: bool, **options: Any
) -> Outcome:
    """Answer in an engine whose cache knows the shared prefix when the second request comes."""
    return run(
        runner,
        sequences(answers),
        num_blocks=way.num_blocks,
        token_budget=way.token_budget,
        arrivals_per_step=way.arrivals_per_step,
        max_num_seqs=6,
        headroom_tokens=0 if way.num_blocks < 400 else 128,
        enable_prefix_caching=way.caching,
        state=StateConfig(num_slots=NUM_SLOTS, interval_blocks=2) if has_states and way.caching else None,
        **options,
    )


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("model")
    MODELS[request.param](directory / "model")
    save_tiny_model(directory / "draft")
    sharpen(directory / "draft")
    if request.param not in FAMILIES:
        sharpen(directory / "model")
    return request.param, directory


@pytest.mark.parametrize(("model", "proposer"), PAIRS, indirect=["model"])
def test_drafts_leave_answers_as_they_are(model: tuple[str, Path], proposer: str) -> None:
    name, directory = model
    has_states = name in RECURRENT
    alone = Way(40, 1, caching=False)
    plain = {
        dtype: answered(make_runner(directory / "model", kv_cache_dtype=dtype), alone, has_states=has_states).tokens
        for dtype in ("auto", "int8")
    }
    num_drafted = num_accepted = 0
    for label, way in WAYS.items():
        settings = {"draft_model": directory / "draft"} if proposer == "draft" else {}
        runner, recorder = recorded_runner(
            directory / "model",
            lambda *_: None,
            speculative=proposer,
            num_speculative_tokens=DEPTH,
            kv_cache_dtype=way.kv_cache_dtype,
            **settings,
        )
        if isinstance(recorder.proposer, HiddenVectorProposer):
            recorder.proposer._least_chance = 0.005
        known = plain[way.kv_cache_dtype] if proposer == "ngram" else None
        outcome = answered(runner, way, known, has_states=has_states, policy=FixedDepth(DEPTH))
        assert not recorder.failures, label
        assert outcome.tokens == plain[way.kv_cache_dtype], label
        assert not outcome.errors, label
        assert (outcome.num_prefix_hits > 0) == (way.caching and way.arrivals_per_step < 100), label
        assert (outcome.num_preemptions > 0) == (label == "preempted"), label
        assert outcome.speculation is not None
        num_drafted += outcome.speculation.num_draft_tokens
        num_accepted += outcome.speculation.num_accepted_tokens
    assert num_drafted > 20
    assert 0 < num_accepted < num_drafted
