"""`kvtool inspect codec`: what each level costs and loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.charts.spark import sparkline
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report


@dataclass(frozen=True, kw_only=True)
class CodecOptions(Options, settings=False):
    """Options of the schemes to measure."""

    scheme: tuple[str, ...] = option(
        (), "Measure only these: 1, cachegen-1, int8, keep50-2 …", group="Codec", metavar="NAME"
    )


def codec(desk: Desk) -> Findings:
    """Answer questions from exact KV and from each compression level. Report size and loss of each."""
    batch = desk.get(BatchOptions)
    requests, options = batch.requests("codec"), desk.query_options(*RETRIEVAL)
    from kvtool.core.compress.loss import HeavyRows
    from kvtool.lab.charts.codec import codec_sections
    from kvtool.lab.measure.codec import chosen_schemes, codec_facts, codec_overview, codec_rows
    from kvtool.lab.measure.evaluation import Evaluation
    from kvtool.lab.measure.journal import Journal

    desk.identity.check_movable("inspect codec")
    profile, session = desk.session.profiles.current(), desk.session
    wanted = chosen_schemes(desk.get(CodecOptions).scheme, profile, HeavyRows(session))
    journal = Journal(
        desk.get(ResumeOptions).resume, codec_facts(session, requests, options, profile), "kvtool inspect codec"
    )
    evaluation = Evaluation(requests[: batch.limit], list(wanted), journal, desk.events, strict=True)
    evaluation.work_off(partial(codec_rows, session, wanted, options))
    identity = session.identity
    resolved = {"model": identity.model, "device": session.decoder.device, "dtype": session.arithmetic.dtype}
    value = {"resolved": resolved} | codec_overview(journal.rows, list(wanted))
    return Findings("Codec levels", value, [*_told(value)], codec_sections(value))


def _told(value: dict[str, Any]) -> Iterator[str | Table]:
    from kvtool.lab.charts.codec import codec_table

    yield codec_table(value)
    for row in value["schemes"]:
        keys, values = ([layer[side] for layer in row["layers"]] for side in ("k_relative_error", "v_relative_error"))
        yield (
            f"error by layer, {row['scheme']:<8} keys {sparkline(keys)} up to {max(keys):.1%}"
            f"   values {sparkline(values)} up to {max(values):.1%}"
        )
    if "f1" in value["exact"]:
        yield f"F1 from exact records: {value['exact']['f1']:.3f}, {counted(value['questions'], 'question')}"


REPORT = Report(
    codec,
    takes=(BatchOptions, ResumeOptions, CodecOptions, QueryOptions.some(*RETRIEVAL), ModelOptions),
    examples=(
        "inspect codec --batch questions.jsonl",
        "inspect codec --batch questions.jsonl --limit 20 --html codec.html",
    ),
)
