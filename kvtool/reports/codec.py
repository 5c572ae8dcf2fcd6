"""`kvtool inspect codec`: bits and loss of each codec level, on the same questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import LEVELS, level_of, lossy
from kvtool.core.common.text import counted
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.reports.report import RETRIEVAL, BatchOptions, Report, ReportContext, ReportResult, Shown, Table, sparkline

if TYPE_CHECKING:
    from kvtool.core.codec.profile import Profile
    from kvtool.core.compress.loss import HeavyRows, Scheme
    from kvtool.core.evaluate.measures import Row
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session


@dataclass(frozen=True, kw_only=True)
class CodecOptions(Options, settings=False):
    scheme: tuple[str, ...] = option((), "Measure only these: 1, cachegen-1, keep50-2 …", group="Codec", metavar="NAME")


def codec(context: ReportContext) -> ReportResult:
    """Answer questions from exact KV and from each compression level. Report size and loss of each."""
    batch = context.get(BatchOptions)
    requests, options = batch.requests("codec"), context.query_options(*RETRIEVAL)
    from kvtool.core.compress.loss import HeavyRows

    context.identity.check_movable("inspect codec")
    session = context.session
    identity, profile = session.identity, session.profiles.current()
    wanted = chosen_schemes(context.get(CodecOptions).scheme, profile, HeavyRows(session))
    _ = session.decoder  # whose context a prompt has to fit
    asked = requests[: batch.limit]
    context.events.step("questions", len(asked), "questions")
    rows = []
    for request in asked:
        rows.append(codec_rows(session, request, wanted, options))
        context.events.advance(1)
    resolved = {"model": identity.model, "device": session.decoder.device, "dtype": session.model.arithmetic.dtype}
    value = {"resolved": resolved} | codec_overview(rows)
    return ReportResult("Codec levels", value, [*_summary(value)])


# ---- measurement ----


def chosen_schemes(names: Sequence[str], profile: Profile | None, heavy: HeavyRows) -> dict[str, Scheme]:
    """Choose the named levels; without names all that store every row. Raises UsageError."""
    from kvtool.core.compress.loss import LevelScheme

    levels = [level for level in lossy() if profile is not None or not level_of(level).profiled]
    known: dict[str, Scheme] = {name: LevelScheme(name, profile, heavy) for name in levels}
    if unknown := [name for name in names if name not in known]:
        some = ", ".join(name for name in unknown if name in LEVELS)
        hint = f"; {some} with a profile, which `kvtool compress` makes" if some else ""
        raise UsageError(f"there is no scheme {', '.join(unknown)}", f"known: {', '.join(known)}{hint}")
    return {name: known[name] for name in names or known if names or level_of(name).share == 100}


def codec_rows(
    session: Session, request: Request, schemes: Mapping[str, Scheme], options: QueryOptions
) -> Mapping[str, Row]:
    from kvtool.core.compress.loss import Question, measure
    from kvtool.core.query.prompt import lay_out

    plan = lay_out(session, request, options, exactly=True).plan
    for segment in plan.segments[:-1]:
        if segment.ids and not level_of(segment.source.level or "").lossless:
            raise KvtoolError(
                f"chunk {segment.source.chunk_id.hex()[:12]} is not stored exactly",
                "ingest its document into a new store",
            )
    return measure(session, Question(plan, request.answers), schemes)


def codec_overview(rows: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    """Make the JSON of `inspect codec`. Bits count headers, digests, states and side information, but no profile."""
    from kvtool.core.compress.loss import EXACT, Toll, mean_loss, tolls_of

    losses = {name: [question[name] for question in rows] for name in rows[0]}
    exact, schemes = mean_loss(losses.pop(EXACT)), []
    for name, of_scheme in losses.items():
        tolls = tolls_of(of_scheme)
        bits = sum(tolls, Toll()).bits
        layers = [{"layer": layer} | toll.to_json() for layer, toll in enumerate(tolls)]
        row = {"scheme": name, "bits_per_element": bits, "ratio_vs_16bit": 16 / bits if bits else None}
        schemes.append({**row, **mean_loss(of_scheme), "layers": layers})
    return {"questions": len(rows), EXACT: exact, "schemes": schemes}


# ---- for people ----


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    yield _table(value)
    for row in value["schemes"]:
        keys, values = ([layer[side] for layer in row["layers"]] for side in ("k_relative_error", "v_relative_error"))
        yield (
            f"error by layer, {row['scheme']:<8} keys {sparkline(keys)} up to {max(keys):.1%}"
            f"   values {sparkline(values)} up to {max(values):.1%}"
        )
    if "f1" in value["exact"]:
        yield f"F1 from exact records: {value['exact']['f1']:.3f}, {counted(value['questions'], 'question')}"


def _table(value: Mapping[str, Any]) -> Table:
    head = ("scheme", "bits/element", "of 16 bit", "KL of answers", "KL of first", "same tokens", "F1")
    rows = (
        (
            *(row["scheme"], f"{row['bits_per_element']:.3f}", f"{row['ratio_vs_16bit']:.2f}x"),
            *(f"{row['kl_answer']:.4f}", f"{row['kl_first']:.4f}", f"{row['top1_agrees']:.1%}"),
            f"{row['f1']:.3f}" if "f1" in row else "-",
        )
        for row in value["schemes"]
    )
    return Table(head, tuple(rows))


CODEC = Report(
    codec,
    takes=(BatchOptions, CodecOptions, QueryOptions.some(*RETRIEVAL), ModelOptions),
    examples=(
        "inspect codec --batch questions.jsonl",
        "inspect codec --batch questions.jsonl --limit 20 --html codec.html",
    ),
)
