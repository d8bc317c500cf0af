"""The chart of errors against budgets."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from mergegit.cli.chart import error_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_it_is_well_formed_and_has_a_line_and_points_for_each_series() -> None:
    series = {"ours & theirs": [(1.0, 0.9), (10.0, 0.3), (100.0, 0.0)], "other": [(5.0, 0.5)]}
    root = ET.fromstring(error_chart("errors <now>", series))
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert len(root.findall(f"{SVG}circle")) == 4
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "ours & theirs at 10%: 0.300" in titles


def test_larger_budgets_are_to_the_right_and_larger_errors_above() -> None:
    root = ET.fromstring(error_chart("t", {"a": [(1.0, 1.0), (100.0, 0.0)]}))
    first, last = root.findall(f"{SVG}circle")
    assert float(first.get("cx", 0)) < float(last.get("cx", 0))
    assert float(first.get("cy", 0)) < float(last.get("cy", 0))


def test_errors_above_one_stay_inside_the_picture() -> None:
    root = ET.fromstring(error_chart("t", {"a": [(10.0, 1.7)]}))
    assert float(root.findall(f"{SVG}circle")[0].get("cy", 0)) > 0
