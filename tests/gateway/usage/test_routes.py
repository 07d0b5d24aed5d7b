"""Which buckets are told, and which times are refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from starlette.datastructures import QueryParams

from gateway.errors import ApiError
from gateway.usage.routes import _WIDTHS, UsageRoutes, _date, _results, _span

HOUR, DAY, NOW = 3600, 86400, 1_795_971_845


@pytest.mark.parametrize(
    ("width", "query", "param", "words"),
    [
        ("1h", {"start_time": NOW - 30 * DAY}, "start_time", f"before {NOW // HOUR * HOUR - 7 * DAY}: hours are kept"),
        ("1d", {"start_time": NOW - 401 * DAY}, "start_time", f"before {(NOW // DAY - 400) * DAY}: days are kept"),
        ("1h", {"start_time": NOW, "end_time": NOW - 1}, "end_time", "is before 'start_time'"),
        ("1d", {"start_time": NOW - DAY, "end_time": 5}, "end_time", "is before 'start_time'"),
    ],
)
def test_time_that_has_no_answer_is_refused(width: str, query: dict[str, int], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        _span(QueryParams(query), _WIDTHS[width], NOW)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_span_is_of_whole_buckets_until_now() -> None:
    hour, day = _WIDTHS["1h"], _WIDTHS["1d"]
    week = NOW - 7 * DAY
    assert _span(QueryParams({"start_time": week}), hour, NOW) == (week // HOUR * HOUR, NOW)
    assert _span(QueryParams({"start_time": NOW - DAY, "end_time": NOW + DAY}), day, NOW) == (
        (NOW - DAY) // DAY * DAY,
        NOW,
    )
    later = QueryParams({"start_time": week, "page": week + DAY})
    assert _span(later, hour, NOW + HOUR)[0] == week // HOUR * HOUR + HOUR, "an hour ended between two pages"


@pytest.mark.parametrize(
    ("counts", "energy_joules"), [({}, None), ({"energy_mj": 0}, None), ({"energy_mj": 2500}, 2.5)]
)
def test_energy_that_no_device_tells_is_null(counts: dict[str, int], energy_joules: float | None) -> None:
    routes = UsageRoutes.__new__(UsageRoutes)
    routes._cost = None
    assert routes._model_usage("m", "batch", counts | {"requests": 1}).energy_joules == energy_joules


def test_day_is_given_once_or_not_at_all() -> None:
    assert _date([], "start") is None
    assert _date(["2026-11-29"], "start") == datetime(2026, 11, 29, tzinfo=UTC)
    for texts in (["2026-11-29"] * 2, [""], ["29.11.2026"], ["2026-11-31"]):
        with pytest.raises(ApiError, match="'start' must be one day") as caught:
            _date(texts, "start")
        assert (caught.value.status, caught.value.param) == (400, "start")


@pytest.mark.parametrize(
    ("groups", "models", "only_batch", "told"),
    [
        ((), (), None, [(None, None, 111)]),
        (("model",), (), None, [("a", None, 11), ("b", None, 100)]),
        (("batch",), (), None, [(None, False, 1), (None, True, 110)]),
        (("model", "batch"), (), None, [("a", False, 1), ("a", True, 10), ("b", True, 100)]),
        (("model", "batch"), ("a",), None, [("a", False, 1), ("a", True, 10)]),
        (("model", "batch"), (), True, [("a", True, 10), ("b", True, 100)]),
        ((), ("a",), False, [(None, None, 1)]),
        # Models may have the names of groups.
        ((), ("model", "batch"), None, []),
    ],
)
def test_usage_is_grouped_and_filtered_by_model_and_lane(
    groups: tuple[str, ...],
    models: tuple[str, ...],
    only_batch: bool | None,
    told: list[tuple[str | None, bool | None, int]],
) -> None:
    lanes = {("a", "interactive"): 1, ("a", "batch"): 10, ("b", "batch"): 100}
    counts = {
        key: {
            "requests": number,
            "prompt_tokens": 2 * number,
            "cached_tokens": 3 * number,
            "completion_tokens": 4 * number,
        }
        for key, number in lanes.items()
    }
    results = _results(counts, {*groups}, {*models}, only_batch=only_batch)
    assert [(each.model, each.batch, each.num_model_requests) for each in results] == told
    assert all(each.input_tokens == 2 * each.num_model_requests for each in results)
    assert all(each.input_cached_tokens == 3 * each.num_model_requests for each in results)
    assert all(each.output_tokens == 4 * each.num_model_requests for each in results)
