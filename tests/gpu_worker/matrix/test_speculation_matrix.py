"""Speculation mixed with everything else answers as plain decoding does, each sequence alone in its batch.

Mixtures are where engines break: of all factors each pair of levels meets in the default run, and all of them in the
slow one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import asdict

import pytest

from gpu_worker.core.sequence import Sequence
from shared.messages import Lane
from tests.gpu_worker.matrix.checks import check_answer, check_between_steps, check_nothing_is_left, check_usage
from tests.gpu_worker.matrix.factors import (
    ENGINE_FACTORS,
    FACTORS,
    PLAIN,
    REQUEST_FACTORS,
    SAMPLINGS,
    Ask,
    EngineCell,
    all_pairs,
    covering_selection,
    pairs_of,
    whole_product,
)
from tests.gpu_worker.matrix.parts import NUM_SCARCE_BLOCKS, make_parts, prediction_of
from tests.gpu_worker.matrix.traffic import NUM_BEHIND, Choice, Oracle, Traffic, choices_of, emitted_tokens

SELECTION = covering_selection(seed=1, num_asks=4)
PROPOSERS = ENGINE_FACTORS["proposer"]
PRIMER = Choice(Ask("greedy", "1", "hit", "nothing", "fresh"), 50)
QUITTER = Choice(Ask("temperature", "1", "none", "nothing", "fresh"), 51)
LAST = Choice(Ask("greedy", "1", "none", "nothing", "fresh"), 52)
LANES: tuple[Lane, ...] = ("interactive", "interactive", "batch")
BYSTANDERS = [
    Choice(Ask(sampling, "1", prefix, "nothing", "fresh"), 53, lane)
    for sampling, prefix, lane in zip(SAMPLINGS, itertools.cycle(("hit", "none")), itertools.cycle(LANES), strict=False)
]


def sequences_of(choices: Iterable[Choice], cell: EngineCell, oracle: Oracle) -> list[Sequence]:
    sequences = []
    for choice in choices:
        prediction = prediction_of(cell, oracle.script(choice, cell), choice.number)
        sequences.append(choice.sequence(emitted_tokens(choice, oracle.answer(choice, cell)), prediction))
    return sequences


def check_cell(
    oracle: Oracle,
    cell: EngineCell,
    choices: Values[Choice],
    *,
    arrivals_per_step: int = 2,
    num_scarce_blocks: int = NUM_SCARCE_BLOCKS,
) -> Traffic:
    """Answer all in one engine, where a prefix is cached already and one client gives up amid the others."""
    everybody = [PRIMER, QUITTER, LAST, *choices]
    scripts = {choice.name: oracle.script(choice, cell) for choice in everybody}
    traffic = Traffic(make_parts(oracle.models, cell, scripts, num_scarce_blocks))
    traffic.run(sequences_of([PRIMER], cell, oracle))

    given_up = []

    def give_up(step: int) -> None:
        check_between_steps(traffic)
        quitters = [sequence for sequence in traffic.engine.scheduler.sequences if sequence.id == QUITTER.name]
        if any(step == 5 or sequence.num_output_tokens for sequence in quitters):
            given_up.append(traffic.engine.abort(QUITTER.name))

    coming = sequences_of([QUITTER, *choices], cell, oracle)
    traffic.run(coming, arrivals_per_step=arrivals_per_step, between_steps=give_up)
    assert len(given_up) == 1, "no request was given up"
    for choice in choices:
        check_answer(choice, cell, traffic, oracle.answer(choice, cell))
    check_usage(traffic)
    traffic.run(sequences_of([LAST], cell, oracle))
    check_nothing_is_left(traffic, LAST.name)
    return traffic


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_selected_mixtures_answer_as_plain_decoding_does(oracle: Oracle, proposer: str) -> None:
    num_drafted, num_accepted, finishes = dict.fromkeys(ENGINE_FACTORS["depth"], 0), 0, set()
    num_preemptions = []
    for place, (cell, asks) in enumerate(SELECTION):
        if cell.proposer != proposer:
            continue
        others = random.Random(place).sample(BYSTANDERS, len(BYSTANDERS))
        traffic = check_cell(oracle, cell, [*choices_of(asks), *others])
        scheduler = traffic.parts.scheduler
        assert scheduler.speculation is not None
        num_drafted[cell.depth] += scheduler.speculation.num_draft_tokens
        num_accepted += scheduler.speculation.num_accepted_tokens
        if cell.blocks == "scarce":
            num_preemptions.append(scheduler.stats.num_preemptions)
        finishes |= {finish for answer in traffic.answers.values() for finish in answer.finishes}
    assert finishes == {"stop", "length"}
    assert min(num_drafted.values()) > 20
    assert 10 < num_accepted < sum(num_drafted.values()) - 10
    # Some have ended before they could be in each other's way.
    assert num_preemptions.count(0) <= 0.3 * len(num_preemptions)


def check_failover(oracle: Oracle, first: EngineCell, second: EngineCell, asks: Iterable[Ask], seed: int) -> int:
    """Let another worker finish what the first has begun; return how many sequences were cut in two."""
    choices = choices_of(asks)
    scripts = {choice.name: oracle.script(choice, first) for choice in choices}

    def go_on(choice: Choice, cell: EngineCell, emitted: list[int]) -> Sequence:
        return choice.sequence(emitted, prediction_of(cell, scripts[choice.name], seed))

    begun = Traffic(make_parts(oracle.models, first, scripts))
    generator = random.Random(seed)
    fresh = [go_on(choice, first, []) for choice in choices]
    begun.run(fresh, arrivals_per_step=4, max_steps=generator.randint(5, 8))
    emitted = {choice.name: begun.answers[choice.name].token_ids for choice in choices if choice.name in begun.answers}
    rest = Traffic(make_parts(oracle.models, second, scripts))
    left = [go_on(choice, second, emitted.get(choice.name, [])) for choice in choices]
    generator.shuffle(left)
    rest.run(left, arrivals_per_step=3)
    for choice in choices:
        whole = oracle.answer(choice, first)
        check_answer(choice, second, rest, whole)
        assert emitted.get(choice.name, []) + rest.answers[choice.name].token_ids == whole.token_ids
    return sum(0 < len(tokens) < len(scripts[name]) - NUM_BEHIND for name, tokens in emitted.items())


def failover_cells(first: str, second: str, place: int) -> tuple[EngineCell, EngineCell]:
    runners, caches = ENGINE_FACTORS["runner"], ENGINE_FACTORS["kv_cache"]
    cache = caches[place % 3]
    # Eight bits need not round alike on the host and on a device.
    either = runners if cache == "auto" else runners[1:]
    return (
        EngineCell(first, either[place % len(either)], cache, "ample", "large", "fixed"),
        EngineCell(second, either[place // 2 % len(either)], cache, "scarce", "small", "adaptive"),
    )


FAILOVERS = [(first, second) for first in PROPOSERS for second in (PROPOSERS[PROPOSERS.index(first) - 1], PLAIN)]


@pytest.mark.parametrize(("first", "second"), FAILOVERS)
def test_sequences_go_on_elsewhere_as_they_would_have(oracle: Oracle, first: str, second: str) -> None:
    place = FAILOVERS.index((first, second))
    asks = [
        Ask(sampling, "2", "hit" if place % 2 else "none", reports, "resumed")
        for sampling, reports in zip(SAMPLINGS, itertools.cycle(REQUEST_FACTORS["reports"]), strict=False)
    ]
    assert check_failover(oracle, *failover_cells(first, second, place), asks, place) > 5


@pytest.mark.parametrize("runner", ["host", "graphed"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_step_that_fails_once_is_noticed_by_nobody(
    oracle: Oracle, proposer: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = EngineCell(proposer, runner, "auto", "scarce", "small", "fixed")
    scripts = {choice.name: oracle.script(choice, cell) for choice in [LAST, *BYSTANDERS]}
    coming = sequences_of(BYSTANDERS, cell, oracle)
    traffic = Traffic(make_parts(oracle.models, cell, scripts), (RuntimeError,))
    # Within a step, or when all of it has been submitted.
    owner, name = (traffic.parts.runner.model, "forward") if runner == "host" else (traffic.parts.runner, "submit")
    whole, numbers = getattr(owner, name), itertools.count()

    def fail_once(*arguments: object) -> object:
        result = whole(*arguments)
        if next(numbers) == 7:
            raise RuntimeError("device lost")
        return result

    monkeypatch.setattr(owner, name, fail_once)
    traffic.run(coming)
    assert traffic.engine.stats.num_failed_steps == 1
    for choice in BYSTANDERS:
        check_answer(choice, cell, traffic, oracle.answer(choice, cell))
    traffic.run(sequences_of([LAST], cell, oracle))
    check_nothing_is_left(traffic, LAST.name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_cache", ENGINE_FACTORS["kv_cache"])
@pytest.mark.parametrize("runner", ENGINE_FACTORS["runner"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_all_mixtures_answer_as_plain_decoding_does(oracle: Oracle, proposer: str, runner: str, kv_cache: str) -> None:
    # Both choices of a request: an engine does not know which sequences belong together.
    asks = [Ask(**levels) for levels in whole_product(REQUEST_FACTORS | {"n": ("2",)})]
    rest = {name: levels for name, levels in ENGINE_FACTORS.items() if name in ("blocks", "budget", "depth")}
    num_drafted = dict.fromkeys(ENGINE_FACTORS["depth"], 0)
    for levels in whole_product(rest):
        cell = EngineCell(proposer, runner, kv_cache, **levels)
        scheduler = check_cell(
            oracle, cell, choices_of(asks), arrivals_per_step=16, num_scarce_blocks=24
        ).parts.scheduler
        assert scheduler.stats.num_preemptions > 0 or cell.blocks == "ample", cell
        assert scheduler.speculation is not None
        num_drafted[cell.depth] += scheduler.speculation.num_draft_tokens
        # A policy gives up where chance alone makes drafts right.
        assert scheduler.speculation.num_accepted_tokens > 0 or cell.depth == "adaptive", cell
    assert min(num_drafted.values()) > 0


def test_all_pairs_of_levels_meet_in_the_selection() -> None:
    rows = (asdict(cell) | asdict(ask) for cell, asks in SELECTION for ask in asks)
    assert set().union(*map(pairs_of, rows)) == all_pairs(FACTORS)
