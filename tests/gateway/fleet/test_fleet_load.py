"""Waiting work that workers claim counts up to what gateways have given out."""

from __future__ import annotations

import msgspec
import pytest

from gateway.fleet.fleet_load import credible_waiting
from shared.messages import GatewayHeartbeat, Heartbeat
from shared.worker_metrics import WorkerMetrics
from tests.gateway.fleet.test_fleet import BEAT

TEMPLATE_TOKENS = 256


def worker(waiting: int, tokens: int, of_batch_lane: int | None = None) -> Heartbeat:
    metrics = None if of_batch_lane is None else WorkerMetrics(waiting_batch=of_batch_lane)
    return msgspec.structs.replace(BEAT, waiting=waiting, waiting_tokens=tokens, metrics=metrics)


def gateway(awaited: dict[str, tuple[int, int]] | None) -> GatewayHeartbeat:
    return GatewayHeartbeat(gateway="g", unclaimed=0, unclaimed_tokens=0, awaited=awaited)


@pytest.mark.parametrize(
    ("claimed", "given_out", "credible"),
    [
        # (requests, tokens): below what was given out, at it, and beyond.
        ((1, 10), (2, 20), (1, 10)),
        ((2, 20), (2, 20), (2, 20)),
        ((3, 20), (2, 20), (2, 20)),
        ((2, 70 + 2 * TEMPLATE_TOKENS), (2, 20), (2, 70 + 2 * TEMPLATE_TOKENS)),
        ((2, 71 + 2 * TEMPLATE_TOKENS), (2, 20), (2, 70 + 2 * TEMPLATE_TOKENS)),
        # Three tokens of an estimate are ten and a half.
        ((1, 10**6), (1, 3), (1, 10 + TEMPLATE_TOKENS)),
        ((5, 10**6), (0, 0), (0, 0)),
    ],
)
def test_claims_count_up_to_what_this_gateway_gave_out(
    claimed: tuple[int, int], given_out: tuple[int, int], credible: tuple[int, int]
) -> None:
    assert credible_waiting("m", [worker(*claimed)], [], {"m": given_out, "other": (99, 10**6)}) == credible


def test_model_of_which_nothing_was_given_out_waits_for_nothing() -> None:
    assert credible_waiting("m", [worker(4, 40)], [], {"other": (9, 900)}) == (0, 0)
    assert credible_waiting("m", [worker(4, 40)], [gateway({"other": (9, 900)})], {}) == (0, 0)
    assert credible_waiting("m", [], [], {"m": (9, 900)}) == (0, 0)


def test_batch_jobs_do_not_count_and_a_worker_that_has_more_of_them_takes_nothing_from_others() -> None:
    workers = [worker(5, 10, of_batch_lane=3), worker(1, 20, of_batch_lane=4), worker(2, 30, of_batch_lane=0)]
    assert credible_waiting("m", workers, [], {"m": (99, 900)}) == (2 + 0 + 2, 60)


@pytest.mark.parametrize(
    ("theirs", "most"),
    [
        # Each gateway waits for as many as this one at least.
        ({}, (2 + 2, 2 * 20)),
        ({"m": (1, 5)}, (2 + 2, 2 * 20)),
        ({"m": (3, 5)}, (2 + 3, 2 * 20)),
        ({"m": (1, 30)}, (2 + 2, 20 + 30)),
        ({"other": (50, 5000)}, (2 + 2, 2 * 20)),
    ],
)
def test_other_gateways_have_given_work_out_too(theirs: dict[str, tuple[int, int]], most: tuple[int, int]) -> None:
    found = credible_waiting("m", [worker(99, 10**6)], [gateway(theirs)], {"m": (2, 20)})
    assert found == (most[0], int(most[1] * 3.5) + most[0] * TEMPLATE_TOKENS)


def test_each_of_several_workers_and_gateways_counts() -> None:
    assert credible_waiting("m", [worker(1, 10), worker(2, 200)], [], {"m": (9, 900)}) == (3, 210)
    gateways = [gateway({"m": (1, 20)}), gateway({"m": (4, 20)})]
    assert credible_waiting("m", [worker(99, 0)], gateways, {"m": (2, 20)}) == (2 + 2 + 4, 0)


def test_gateway_of_a_version_that_does_not_say_leaves_claims_as_they_are() -> None:
    gateways = [gateway({"m": (1, 1)}), gateway(None)]
    assert credible_waiting("m", [worker(99, 10**6, of_batch_lane=9)], gateways, {"m": (2, 20)}) == (90, 10**6)
