"""The page of `inspect codec`."""

from __future__ import annotations

from kvtool.reports.codec import codec_sections


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
