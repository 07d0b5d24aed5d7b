from __future__ import annotations

import re
from xml.etree import ElementTree

from ops.chart import Line, bar_chart, line_chart
from ops.chart import page as chart_page
from ops.simulation.report import Cost, figures, html, table
from ops.simulation.workload import Synthetic
from tests.ops.simulation.fleets import PLAIN, served

SVG = "{http://www.w3.org/2000/svg}"


def _plots(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_page_has_a_plot_of_each_measure_and_needs_nothing_from_elsewhere() -> None:
    outcome = served(Synthetic(50, 10.0, 50, 20))
    page = html("A <fleet>", PLAIN, outcome, Cost(2, 1.5), {})
    assert [plot.findtext("title") for plot in _plots(page)] == [
        "Requests",
        "Tokens a second",
        "Refused attempts a second",
        "Share of blocks in use",
        "Time to first token, by percentile",
    ]
    for plot in _plots(page):
        assert all(len(line.attrib["points"].split()) > 1 for line in plot.iter("polyline"))
        assert any(True for _ in plot.iter("polyline"))
    assert "<h1>A &lt;fleet&gt;</h1>" in page
    assert not re.search(r"https?://|<script|<link", page)


def test_line_ends_where_its_last_point_is() -> None:
    (plot,) = _plots(line_chart("t", "x", [Line("l", [0.0, 10.0], [0.0, 5.0])]))
    (line,) = plot.iter("polyline")
    first, last = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    # The bottom left and the top right of the frame, which reaches from 0 to 10 and to 5.
    assert (first, last) == ((64.0, 206.0), (632.0, 14.0))
    assert "5" in [text.text for text in plot.iter("text")]


def test_bars_are_as_high_as_their_values() -> None:
    (plot,) = _plots(bar_chart("t", [("a", 10.0), ("b", 5.0)]))
    high, low = [float(bar.attrib["height"]) for bar in plot.iter("rect")]
    assert high == 2 * low


def test_cost_is_that_of_all_devices_for_the_time_that_a_million_tokens_take() -> None:
    assert Cost(4, 3.6).per_million(1000.0) == 4.0
    assert Cost(4, 3.6).per_million(0.0) is None


def test_errors_of_the_prediction_stand_beside_what_they_are_of() -> None:
    outcome = served(Synthetic(20, 10.0, 50, 20))
    errors = {"ttft_p50": 0.12, "ttft_p99": 0.2}
    lines = table(PLAIN, outcome, None, errors)
    (told,) = [line for line in lines if "±" in line]
    assert told.startswith("time to first token")
    assert "± 12% / 20% on loads it was not fitted to" in told
    assert figures(PLAIN, outcome, None, errors)["errors"] == errors


def test_numbers_below_the_axis_stand_within_the_frame() -> None:
    (plot,) = _plots(line_chart("t", "x", [Line("l", [0.0, 8.0], [0.0, 5.0])]))
    below = {text.attrib["x"]: text for text in plot.iter("text") if text.attrib["y"] == "222"}
    assert [text.text for text in below.values()] == ["0", "2", "4", "6", "8"]
    assert [text.attrib["text-anchor"] for text in below.values()] == [*["middle"] * 4, "end"]


def test_page_has_its_lines_as_text_above_its_plots() -> None:
    shown = chart_page("a & b", ["x < 1", "y"], ["<svg/>"])
    assert "<pre>x &lt; 1\ny</pre>\n<svg/>\n" in shown
    assert shown.count("a &amp; b") == 2


def test_lines_of_the_frame_are_at_the_bottom_the_middle_and_the_top() -> None:
    (plot,) = _plots(line_chart("t", "x", [Line("l", [0.0, 8.0], [0.0, 5.0])], bottom=1.0))
    beside = [(text.text, text.attrib["y"]) for text in plot.iter("text") if text.attrib["x"] == "58"]
    assert beside == [("1", "210.0"), ("3", "114.0"), ("5", "18.0")]
    assert [line.attrib["y1"] for line in plot.iter("line")] == ["206.0", "110.0", "14.0"]
