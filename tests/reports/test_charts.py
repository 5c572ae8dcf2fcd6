"""The chart is an XML document that holds every point."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from kvtool.reports.charts import Axis, Line, Panel, line_charts

SVG = "{http://www.w3.org/2000/svg}"


def draw(*lines: Line, axis: Axis = "even", logarithmic: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(line_charts("t", [Panel("p", lines, logarithmic)], "x", axis=axis))


def paths_of(root: ElementTree.Element, kind: str) -> list[str]:
    return [path.attrib["d"] for path in root.iter(SVG + "path") if path.attrib.get("class") == kind]


def marks_of(root: ElementTree.Element) -> dict[str, dict[str, str]]:
    """Attributes of the marks of points, by what is shown above them."""
    marks = ((path.find(SVG + "title"), path.attrib) for path in root.iter(SVG + "path"))
    return {title.text or "": attributes for title, attributes in marks if title is not None}


def places_of(root: ElementTree.Element) -> list[float]:
    """Distances of points from the left."""
    marks = (path.attrib["transform"] for path in root.iter(SVG + "path") if path.find(SVG + "title") is not None)
    return [float(mark.removeprefix("translate(").split()[0]) for mark in marks]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_every_point_stands_inside_the_page(logarithmic: bool) -> None:
    lines = (Line('a <b> & "c"', ((512.0, 0.4), (2048.0, 13000.0))), Line("d", ((512.0, 7.0),)))
    text = line_charts("speed & <time>", [Panel("p < q", lines, logarithmic)] * 2, "x", note="n & m")
    root = ElementTree.fromstring(text)
    told = [title.text for title in root.iter(SVG + "title")]
    assert told == ['a <b> & "c": 0.4', 'a <b> & "c": 1.3e+04', "d: 7"] * 2
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for path in root.iter(SVG + "path"):
        for word in path.attrib.get("transform", "").removeprefix("translate(").rstrip(")").split():
            assert 0 <= float(word) <= max(width, height)


def test_all_values_alike_make_a_chart() -> None:
    for value in (0.0, 1.0):
        draw(Line("a", ((1.0, value),)))
    draw(Line("a", ((1.0, 3.0),)), logarithmic=True)


def test_intervals_stand_around_their_points() -> None:
    lines = (Line("a", ((1.0, 2.0), (5.0, 3.0)), ((1.0, 4.0), (3.0, 9.0))), Line("b", ((1.0, 2.0),), ((0.5, 2.5),)))
    paths = paths_of(draw(*lines, Line("c", ((5.0, 1.0),))), "interval")
    places = [re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)M.*", path) for path in paths]
    assert len(places) == 3
    across = [float(place[1]) for place in places if place]
    assert len(set(across)) == 3  # those of two series do not hide one another
    for place in places:
        assert place
        assert 280 >= float(place[2]) > float(place[3]) >= 0


def test_a_variant_has_the_colour_of_its_series_and_is_hollow() -> None:
    point = ((1.0, 2.0),)
    lines = (
        Line("a", point),
        Line("a, less", point, variant_of="a"),
        Line("b", point),
        Line("c, less", point, variant_of="c"),
    )
    root = draw(*lines)
    marks = {title.partition(":")[0]: mark for title, mark in marks_of(root).items()}
    colours = {name: mark.get("fill") or mark["stroke"] for name, mark in marks.items()}
    assert colours["a"] == colours["a, less"]
    assert len({colours[name] for name in ("a", "b", "c, less")}) == 3
    assert marks["a"]["d"] == marks["a, less"]["d"] != marks["b"]["d"]
    assert [name for name, mark in marks.items() if "fill" not in mark] == ["a, less", "c, less"]
    assert sum("stroke-dasharray" in path.attrib for path in root.iter(SVG + "path")) == 2


@pytest.mark.parametrize(
    ("axis", "values", "labels"),
    [("linear", (0, 5, 25), {"0", "5", "10", "15", "20", "25"}), ("logarithmic", (0.5, 1, 16), {"0.5", "1", "16"})],
)
def test_to_scale(axis: Axis, values: tuple[float, ...], labels: set[str]) -> None:
    root = draw(Line("a", tuple((x, 1.0) for x in (*values, 1.02))), axis=axis)
    first, second, last, _ = places_of(root)
    assert (second - first) * 5 == pytest.approx(last - first, abs=0.5)
    told = {text.text for text in root.iter(SVG + "text")}
    assert labels <= told
    assert "1.02" not in told  # it would overlap the 1
    draw(Line("a", ((3.0, 1.0),)), axis=axis)


def test_levels_stand_across_the_plot_and_inside_it() -> None:
    panel = Panel("p", (Line("a", ((1.0, 0.1),)),), levels=(("full & more", 0.9), ("none", 0.05)))
    root = ElementTree.fromstring(line_charts("t", [panel], "x"))
    assert {"full & more", "none"} <= {text.text for text in root.iter(SVG + "text")}
    places = [float(path.split()[1].partition("H")[0]) for path in paths_of(root, "level")]
    assert len(places) == 2
    assert 0 < places[0] < places[1] < 280


def colours_of(names: tuple[str, ...]) -> dict[str, str]:
    marks = marks_of(draw(*(Line(name, ((1.0, 2.0),)) for name in names))).values()
    return {name: mark.get("fill") or mark["stroke"] for name, mark in zip(names, marks, strict=True)}


def test_a_mode_has_one_colour_in_every_figure() -> None:
    few = colours_of(("reuse", "union:0.15", "union:0.05", "other"))
    many = colours_of(("llama.cpp", "kvtool full", "kvtool union", "kvtool reuse", "epic", "blend", "infoflow"))
    assert few["union:0.15"] == many["kvtool union"]
    assert few["reuse"] == many["kvtool reuse"]
    for colours in (few, many):
        assert len(set(colours.values())) == len(colours)


def test_a_logarithmic_axis_has_two_numbers_at_least() -> None:
    for low, high in ((0.0827, 0.0827), (0.011, 0.012), (1.0, 1.0), (3.0, 900.0)):
        root = draw(Line("a", ((1.0, low), (2.0, high))), logarithmic=True)
        ticks = [float(text.text or "") for text in root.iter(SVG + "text") if text.attrib.get("text-anchor") == "end"]
        assert len(ticks) >= 2
        assert len(set(ticks)) == len(ticks)
        if high < 2 * low:
            assert min(ticks) <= low <= high <= max(ticks)
