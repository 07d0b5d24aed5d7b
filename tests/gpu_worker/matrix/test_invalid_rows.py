"""A row whose logits are not a distribution, with every proposer and all samplings beside it: it fails alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.sequence import Sequence
from tests.gpu_worker.matrix.checks import check_answer, check_nothing_is_left
from tests.gpu_worker.matrix.factors import ENGINE_FACTORS, PLAIN, SAMPLINGS, Ask, EngineCell, is_in_default_run
from tests.gpu_worker.matrix.parts import Runner, make_parts
from tests.gpu_worker.matrix.traffic import Choice, Oracle, Traffic

BAD = Choice(Ask("everything", "1", "none", "logprobs", "fresh"), 80)
PRIMER = Choice(Ask("greedy", "1", "hit", "nothing", "fresh"), 81)
LAST = Choice(Ask("greedy", "1", "none", "nothing", "fresh"), 82)
OTHERS = [Choice(Ask(name, "1", "none", "logprobs", "fresh"), 83) for name in SAMPLINGS]
NUM_VALID = 3
INVALID = {"host": math.nan, "device": -math.inf, "graphed": math.nan}


def break_row(runner: Runner, bad: Sequence, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all logits of a sequence be `value`, once its output has `NUM_VALID` tokens."""
    sample = runner._sampler.sample

    def sample_with_bad_row(logits: torch.Tensor, staged: Any) -> Any:
        if bad.row is not None:
            logits[(staged.slots.tensor == bad.row) & (staged.draw.positions.tensor >= NUM_VALID)] = value
        return sample(logits, staged)

    monkeypatch.setattr(runner._sampler, "sample", sample_with_bad_row)


@pytest.mark.parametrize(
    ("proposer", "runner"),
    [
        pytest.param(*levels, marks=[] if is_in_default_run(*levels) else pytest.mark.slow)
        for levels in itertools.product([PLAIN, *ENGINE_FACTORS["proposer"]], ENGINE_FACTORS["runner"])
    ],
)
def test_neighbours_of_an_invalid_row_answer_as_if_alone(
    oracle: Oracle, proposer: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = EngineCell(proposer, runner, "auto", "ample", "large", "fixed")
    everybody = [PRIMER, *OTHERS, BAD, LAST]
    parts = make_parts(oracle.models, cell, {choice.name: oracle.script(choice, cell) for choice in everybody})
    traffic, bad, whole = Traffic(parts), BAD.sequence(), oracle.answer(BAD, cell)
    traffic.run([PRIMER.sequence()])
    with monkeypatch.context() as patch:
        break_row(parts.runner, bad, INVALID[runner], patch)
        coming = [*(choice.sequence() for choice in OTHERS[:7]), bad, *(choice.sequence() for choice in OTHERS[7:])]
        traffic.run(coming, between_steps=lambda _: parts.scheduler.check_integrity())
    answer = traffic.answers[BAD.name]
    assert answer.finishes == ["failed"]
    assert answer.token_ids == whole.token_ids[:NUM_VALID]
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for choice in OTHERS:
        check_answer(choice, cell, traffic, oracle.answer(choice, cell))
    assert traffic.engine.stats.num_failed_steps == 0
    traffic.run([LAST.sequence()])
    check_nothing_is_left(traffic, LAST.name)


@pytest.mark.parametrize("runner", ENGINE_FACTORS["runner"])
def test_invalid_row_without_neighbours_fails_when_it_is_computed_alone(
    oracle: Oracle, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = EngineCell(PLAIN, runner, "auto", "ample", "large", "fixed")
    parts = make_parts(oracle.models, cell, {})
    traffic, bad = Traffic(parts, (InvalidLogitsError,)), BAD.sequence()
    break_row(parts.runner, bad, math.nan, monkeypatch)
    traffic.run([bad])
    assert traffic.answers[BAD.name].finishes == ["failed"]
    assert traffic.answers[BAD.name].token_ids == oracle.answer(BAD, cell).token_ids[:NUM_VALID]
    assert not traffic.engine.stats.is_fatal
    traffic.run([LAST.sequence()])
    check_answer(LAST, cell, traffic, oracle.answer(LAST, cell))
