"""Which buckets are told, and which times are refused."""

from __future__ import annotations

import pytest
from starlette.datastructures import QueryParams

from gateway.errors import ApiError
from gateway.usage.routes import _WIDTHS, UsageRoutes, _span

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
