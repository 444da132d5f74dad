"""Pictures of lines: where names and intervals stand."""

import itertools
from xml.etree import ElementTree

import pytest

from headwater.analyze.plot import FLOOR, HIGH, TOP, Line, Panel, lines_of, picture

SVG = "{http://www.w3.org/2000/svg}"


def drawn(lines):
    """A picture of one panel with these lines."""
    return ElementTree.fromstring(picture([Panel("ratio", "operations", lines)], "label"))


def groups_of(svg):
    """The elements of each line, by its name."""
    groups = svg.findall(f"{SVG}g/{SVG}g")
    return {group.find(f"{SVG}text[@class='named']").text: group for group in groups}


def heights_of_names(svg):
    names = svg.iterfind(f".//{SVG}text[@class='named']")
    return sorted(float(name.get("y")) for name in names)


def flat(name, y=1.0, **spans):
    return Line(name, "plain", {1: [y], 2: [y]}, **spans)


def spanned(name, y=1.0):
    return flat(name, y, spans={1: (0, 3)})


def test_intervals_at_one_place_stand_side_by_side():
    groups = groups_of(drawn([spanned("a"), spanned("b", 2.0), flat("c", 3.0)]))
    places = {}
    for name, group in groups.items():
        x = places[name] = float(group.find(f"{SVG}circle").get("cx"))
        assert group.find(f"{SVG}polyline").get("points").startswith(f"{x},")
        assert all(path.get("d").startswith(f"M{x} ") for path in group.findall(f"{SVG}path"))
    assert (places["a"] + places["b"]) / 2 == places["c"], "one without intervals stays in place"
    assert places["b"] - places["a"] == 5

    # Many of them stay within the axis.
    crowd = drawn([spanned(name) for name in "abcdefgh"])
    axis = next(crowd.iter(f"{SVG}line"))
    first, last = float(axis.get("x1")), float(axis.get("x2"))
    xs = [float(dot.get("cx")) for dot in crowd.iter(f"{SVG}circle")]
    assert first < min(xs) < max(xs) < last


def test_names_beside_lines_neither_overlap_nor_leave_the_picture():
    points = {f"arm {n}": {1: [1.0], 2: [1.0 + n / 1000]} for n in range(6)}
    points["attnres-full"] = {1: [9.0], 2: [9.0]}
    svg = drawn(lines_of(points))
    heights = heights_of_names(svg)
    assert all(after - before >= 12.9 for before, after in itertools.pairwise(heights))
    path = groups_of(svg)["Full"].find(f"{SVG}polyline").get("points")
    end = float(path.rpartition(",")[2])
    assert heights[0] == pytest.approx(end + 4), "beside its line"
    assert heights[-1] <= FLOOR, "above the numbers across"
    crowd = drawn([flat(f"arm {n}") for n in range(19)])
    heights = heights_of_names(crowd)
    assert TOP <= min(heights) < max(heights) < HIGH
