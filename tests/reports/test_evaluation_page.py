"""Figures of the pages of `eval` and `inspect codec`."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from kvtool.reports.codec import codec_sections
from kvtool.reports.evaluation_page import evaluation_sections

SVG = "{http://www.w3.org/2000/svg}"


def run(name: str, share: float, **told: Any) -> dict[str, Any]:
    row = {"run": name, "count": 4, "recomputed_share": share, "kl_answer": 0.2, "f1": 0.5} | told
    row = {name: value for name, value in row.items() if value is not None}
    scores = {name: row[name] for name in ("kl_answer", "f1") if name in row}
    intervals = {"intervals": {name: [value / 2, value * 2] for name, value in scores.items()}}
    return row | intervals | {"ttft_ms_median": 1.0, "speedup": 2.0, "pareto": False}


def figure(runs: list[dict[str, Any]]) -> ElementTree.Element | None:
    value = {"runs": runs, "reference": "full", "questions": 4, "kl_base": None, "resamples": 10}
    figures = next(evaluation_sections(value, "tiny, some/batch.jsonl")).figures
    return ElementTree.fromstring(figures[0]) if figures else None


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(SVG + "text")]


def test_modes_and_their_variants_are_series() -> None:
    named = ("reuse", "blend:0.15", "blend+shift=no:0.15", "union:0.05", "union:0.15", "union+weighting=2:0.15")
    root = figure([run("full", 1), run("none", 1, f1=0.1), *(run(name, 0.15) for name in named)])
    told = words(root)
    for name in ("reuse", "blend", "blend, no shift", "union", "union, weighting=2"):
        assert told.count(name) == 1  # in the legend
    assert [told.count(name) for name in ("full", "no context")] == [1, 1]  # lines across the plot of F1
    assert any("over 4 questions" in text for text in told)
    assert "Modes by how much they recompute: tiny, some/batch.jsonl" in told
    drawn = [path for path in root.iter(SVG + "path") if path.attrib.get("class") == "interval"]
    assert len(drawn) == 2 * 5  # both plots; points of one mode at the same share are one


def test_shares_stand_to_scale_without_full_at_its_hundred() -> None:
    root = figure([run("full", 1), run("reuse", 0), run("union:0.15", 0.1502)])
    assert "100" not in words(root)


def test_questions_without_answers_have_the_distance_alone() -> None:
    root = figure([run(name, share, f1=None) for name, share in (("full", 1), ("reuse", 0))])
    assert "KL of the answer, nats" in words(root)


def test_full_alone_has_no_figure() -> None:
    assert figure([run("full", 1), run("none", 1)]) is None


def scheme(name: str, bits: float) -> dict[str, object]:
    layer = {"layer": 0, "bits_per_element": bits, "k_relative_error": 0.1, "v_relative_error": 0.1}
    figures = {"bits_per_element": bits, "ratio_vs_16bit": 16 / bits, "layers": [layer]}
    return {"scheme": name, "kl_answer": 1 / bits, "kl_first": 0.0, "top1_agrees": 1.0} | figures


def test_a_line_joins_schemes_of_one_kind_only() -> None:
    rows = [scheme("int8", 8.25), scheme("int4", 4.25), scheme("mean-1", 5.1), scheme("1", 3.7), scheme("2", 3.7)]
    levels, _ = codec_sections({"schemes": rows})
    (chart,) = levels.figures
    for kind in ("levels", "int", "mean"):
        assert f">{kind}</text>" in chart
    assert "schemes" not in chart
