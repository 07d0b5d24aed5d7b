"""Agents in virtual time: their trace, what unbounded memory would find of it, and what hints change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.simulation.agents import AgentTrace, oracle_hits
from ops.simulation.cache_curve import BLOCK_SIZE, CONFIG, TIMES, WORKERS, Point, curve, plot, table
from ops.simulation.scenario import Scenario, simulate
from ops.simulation.tiers import TierSizes
from ops.simulation.workload import ANSWER, Arrival
from tests.ops.simulation.fleets import served

SMALL = AgentTrace(sessions=14, rate=4.0, turns=8, output=8, pause_s=1.0)


def test_a_trace_is_a_function_of_its_seed_and_hints_change_nothing_but_themselves() -> None:
    hinted, plain = list(SMALL.arrivals(3, has_hints=True)), list(SMALL.arrivals(3, has_hints=False))
    assert hinted == list(SMALL.arrivals(3, has_hints=True))
    assert hinted != list(SMALL.arrivals(4, has_hints=True))
    assert [replace(arrival, hints=None) for arrival in hinted] == plain
    assert [arrival.at for arrival in hinted] == sorted(arrival.at for arrival in hinted)
    ended = [arrival.hints.session_id for arrival in hinted if arrival.hints and arrival.hints.drop]
    assert len(ended) == len(set(ended)) == len({arrival.hints.session_id for arrival in hinted if arrival.hints})
    assert any("." in name for name in ended if name), "no agent has started another"
    assert max(arrival.prompt for arrival in hinted) < 2 * SMALL.compacts_at


def test_a_turn_begins_with_the_turn_before_and_its_answer() -> None:
    (first, second, *_) = [
        arrival
        for arrival in SMALL.arrivals(3, has_hints=True)
        if arrival.hints is not None and arrival.hints.session_id == "s0"
    ]
    before = first.token_ids(1)
    assert second.token_ids(2)[: len(before) + first.output] == [*before, *[7] * first.output]


def test_unbounded_memory_finds_what_was_computed_before_and_leaves_a_token() -> None:
    first = Arrival(0.0, 128, 64, beginnings=((5, 128),))
    second = Arrival(1.0, 256, 1, beginnings=((5, 128), (ANSWER, 64), (6, 64)))
    # Its last block may have another token at its end, and a prompt of known blocks alone computes its last one.
    assert oracle_hits([first, second], 64) == 128
    assert oracle_hits([second, second], 64) == 192


def test_simulated_workers_find_what_unbounded_memory_would_where_there_is_room() -> None:
    arrivals = list(SMALL.arrivals(3, has_hints=False))
    outcome = served(
        arrivals,
        config=CONFIG,
        workers=WORKERS,
        is_affine=True,
        ttft_slo_s=1e6,
        tiers=TierSizes(64, 1 << 20, 2000.0),
    )
    assert outcome.num_served == len(arrivals)
    assert 0.95 <= outcome.num_cached_tokens / oracle_hits(arrivals, BLOCK_SIZE) <= 1.0


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [pytest.param(512, 16, marks=pytest.mark.slow), (192, 8)])
def test_turns_that_wait_for_their_prefix_start_no_later_than_pulled_alone(num_blocks: int, max_num_seqs: int) -> None:
    trace = AgentTrace(sessions=20, output=60, pause_s=1.5)
    config = replace(CONFIG, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    pulled, waiting = (
        simulate(
            Scenario(WORKERS, config, TIMES, ttft_slo_s=1e6, is_affine=is_affine), trace.arrivals(1, has_hints=False)
        )
        for is_affine in (False, True)
    )
    assert waiting.num_cached_tokens > 1.3 * pulled.num_cached_tokens
    assert waiting.ttft_s[50] < 0.6 * pulled.ttft_s[50]
    assert waiting.ttft_s[99] <= pulled.ttft_s[99]


def test_hints_find_more_in_the_same_memory() -> None:
    (point,) = curve(SMALL, 3, files=(128,))
    assert point.hinted > point.plain


def test_a_curve_is_a_table_and_a_picture() -> None:
    points = [Point(10.0, 0.8, 0.9), Point(20.0, 0.9, 1.0)]
    assert [line.split() for line in table(points)[1:]] == [
        ["10.0", "GB", "0.800", "0.900"],
        ["20.0", "GB", "0.900", "1.000"],
    ]
    assert plot(points).count("<polyline") == 2
