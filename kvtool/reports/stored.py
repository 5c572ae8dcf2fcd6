"""`kvtool inspect`, and its reports `chunk`, `gate` and `audit`: what a store holds. None loads the model."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtool.core.common.marks import Place, as_named_here
from kvtool.core.common.text import counted, level_rows, shown_size
from kvtool.core.errors import EXIT_MISFIT, KvtoolError, UsageError
from kvtool.core.evaluate.measures import DISTANCES, Audit, kept_audits, means
from kvtool.core.model.options import ModelOptions
from kvtool.reports.report import Quote, Report, ReportContext, ReportResult, Shown, Table

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.machine import Arithmetic
    from kvtool.core.session.identity import StoreIdentity

_SPREAD = ("median", "p90", "p99", "max")
_HEAD = (
    *("run", "level", "lead-in", "audits", "recomputed"),
    *("KL answer: median", "answer: 90 %", "answer: 99 %", "answer: worst"),
    *("KL first: median", "first: 90 %", "first: 99 %", "first: worst"),  # a narrow terminal parts them
    *("same first token", "same answer", "worst question"),
)


def glance(context: ReportContext) -> ReportResult:
    """Show what the store holds, and for which model."""
    from kvtool.core.cache.side_files import read_served
    from kvtool.core.session.identity import MeasuredLosses, known_result
    from kvtool.core.upkeep.plan import sizes_of

    store, identity = context.store, context.identity
    verdict, served, sizes = known_result(store, identity.fingerprint), read_served(store.path), sizes_of(store)
    lost = {level: {"kl_answer": loss} for level, loss in MeasuredLosses(store).at_most().items()}
    value: dict[str, Any] = {
        "path": str(store.path),
        **sizes,
        "levels": level_rows({level: row | lost.get(level, {}) for level, row in sizes["levels"].items()}),
        "model": identity.model,
        "dtype": identity.dtype,
        "computed_by": computed_by(store, identity),
        "fingerprint": identity.fingerprint,
        "system": identity.system,
        "lead_in": identity.lead_in.mode,
        "lead_in_tokens": len(identity.lead_in.ids),
        "gate": None if verdict is None else verdict.to_json(),
        "usage": served._asdict() | {"hit_rate": served.hit_rate},
    }
    return ReportResult("Store", value, [*_contents(value)])


def computed_by(store: Store, identity: StoreIdentity) -> list[dict[str, Any]]:
    made: Mapping[Arithmetic | None, int] = Counter(info.arithmetic for info in store.stretches().values())
    made = made or store.arithmetics(chunk for chunk in store.chunk_ids() if chunk != identity.prefix_id)
    counts = sorted(made.items(), key=lambda item: (-item[1], str(item[0])))
    return [
        {"dtype": None if by is None else by.dtype, "device": None if by is None else by.device, "chunks": count}
        for by, count in counts
    ]


def makers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['chunks']:,} in {row['dtype']} on {row['device']}" for row in rows if row["dtype"]]


def _contents(value: Mapping[str, Any]) -> Iterator[Shown]:
    beginning, verdict = value["prefix"] or {"tokens": 0, "levels": []}, value["gate"]
    gate = "not run yet" if verdict is None else "passed" if verdict["passed"] else "FAILED"
    yield f"store    {value['path']}"
    made = makers(value["computed_by"])
    computed = f"; computed {', '.join(made)}" if made else ""
    yield f"model    {value['model']}, kept in {value['dtype']}{computed}; gate {gate}"
    yield f"system   {value['system']}"
    yield f"lead-in  {value['lead_in']}, {value['lead_in_tokens']} tokens"
    documents, chunks = (counted(value[f"{what}s"], what) for what in ("document", "chunk"))
    yield f"content  {documents}, {chunks}; KV of {value['tokens']:,} tokens"
    if value["prefix"]:
        yield f"start    the prompt's own beginning: {beginning['tokens']} tokens, one chunk more"
    of_beginning = {row["level"] for row in beginning["levels"]}
    for row in value["levels"]:
        lost = f", {row['kl_answer']:.4f} nats a token lost at most" if "kl_answer" in row else ""
        first = row["level"] in of_beginning
        what = f"{counted(row['chunks'] - first, 'chunk')}{' and the beginning' if first else ''}"
        yield f"level    {row['level']}: {what}, {row['bytes'] / 1e6:,.1f} MB{lost}"
    if (kept := value["checkpoints"])["count"]:
        what = counted(kept["count"], "state checkpoint")
        yield f"prompts  {what} of answered prompts, {kept['bytes'] / 1e6:,.1f} MB"
    if without := value["without_kv"]:
        yield f"due      {counted(without, 'chunk')} without KV; a loaded model or the next ingest computes it"
    served = value["usage"]
    if served["hit_rate"] is not None:
        asked = served["hits"] + served["misses"]
        questions = counted(served["questions"], "question")
        yield f"served   {questions}; found {served['hit_rate']:.1%} of {counted(asked, 'chunk')}"
    budget = "" if value["budget"] is None else f" of a budget of {shown_size(value['budget'])}"
    yield f"disk     {shown_size(value['folder_bytes'])} used{budget}; {shown_size(value['disk_free'])} free"


GLANCE = Report(glance)


# ---- one chunk ----


def chunk(context: ReportContext) -> ReportResult:
    """Show one chunk: its document, its text, what is stored of it; the model is not loaded."""
    from kvtool.core.cache.identity import chunk_named, is_id
    from kvtool.core.retrieval.finder import Places

    if context.about is None:
        raise UsageError("inspect chunk needs a chunk's id, or its place", "`kvtool store ls --chunks` lists both")
    if is_id(context.about):
        named, more = chunk_named(context.about, context.store.chunk_ids()), []
    else:
        named, *more = (passage.chunk_id for passage in Places(context.store).of_chunks(context.about))
    value = chunk_facts(context.store, named) | {"other_chunks": [other.hex() for other in more]}
    return ReportResult("Chunk", value, [*_chunk_lines(value)], _sensitivities(context, value))


def chunk_facts(store: Store, chunk: bytes) -> dict[str, Any]:
    """Make the JSON of `inspect chunk`. Raises UsageError if the chunk's description is lost."""
    import numpy as np

    info = store.chunk_info(chunk)
    if info is None:
        raise UsageError(f"the description of chunk {chunk.hex()[:12]} is lost", "ingest its document again")
    places, text = [], ""
    for document in store.documents():
        for ref in document.chunks:
            if ref.chunk_id == chunk:
                row = {"source": document.source, "start": ref.start, "end": ref.end}
                places.append(row | asdict(document.place(ref.start, ref.end)))
                text = text or document.text[ref.start : ref.end]
    return {
        "id": chunk.hex(),
        "origin": store.origin(chunk).name,
        "tokens": len(info.token_ids),
        "layers": info.layers,
        "lead_in_digest": info.lead_in.hex(),
        "levels": level_rows(store.level_sizes(chunk)),
        "last_used": store.last_used().get(chunk),
        "places": places,
        "text": text,
        "sensitivity": np.frombuffer(info.sensitivity, "<f2").astype(float).tolist(),
    }


def _chunk_lines(value: Mapping[str, Any]) -> Iterator[Shown]:
    used = value["last_used"]
    yield f"chunk    {value['id']}"
    for place in value["places"]:
        yield f"from     {_where(place)}"
    if value["origin"]:
        yield f"made by  {value['origin']}"
    yield f"content  {value['tokens']} tokens, {value['layers']} layers"
    for row in value["levels"]:
        yield f"level    {row['level']}: {row['bytes']:,} bytes"
    yield f"used     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(used)) if used else 'not yet'}"
    for other in value["other_chunks"]:
        yield f"also     chunk {other} holds something of that place"
    yield Quote(value["text"])


def _where(place: Mapping[str, Any]) -> str:
    cited = Place(place["line"], place["label"]).cite(as_named_here(place["source"]))
    return f"{cited}, characters {place['start']} to {place['end']}"


def _sensitivities(context: ReportContext, value: Mapping[str, Any]) -> Iterator[Table]:
    from kvtool.core.model.tokens import whole_characters

    info, weights = context.store.chunk_info(bytes.fromhex(value["id"])), value["sensitivity"]
    if info is not None and weights:
        pieces = whole_characters(context.session.tokenizer, info.token_ids)
        rows = ((text, f"{max(weights[start:stop]):.3g}") for start, stop, text in pieces)
        yield Table(("token", "sensitivity"), tuple(rows), "how far a token's values depend on text before the chunk")


CHUNK = Report(
    chunk,
    takes=(ModelOptions.some("model", "offline"),),
    about="ID|PATH:LINE",
    about_help="The first six or more digits of a chunk's id, or a place as answers cite it.",
    examples=("inspect chunk 3f2a91 --html chunk.html", "inspect chunk notes.md:12", 'inspect chunk "paper.pdf p. 3"'),
)


# ---- the gate's laws ----


def gate(context: ReportContext) -> ReportResult:
    """Show how near the model is to each law, as measured when it first met the store."""
    from kvtool.core.session.identity import known_result

    verdict = known_result(context.store, context.identity.fingerprint)
    if verdict is None:
        raise KvtoolError("this model has not been checked with this store", "the first answer from stored KV does")
    rows = [
        (
            f"law {c.law}",
            c.name,
            c.arithmetic,
            f"{c.difference:.3g}",
            f"{c.tolerance:.3g}",
            "passed" if c.passed else "FAILED",
        )
        for c in verdict.checks
    ]
    tables = [Table(("law", "check", "computed", "difference", "tolerance", ""), tuple(rows))]
    if others := verdict.cross_dtype_loss.items():
        tables.append(Table(("made in", "nats a token lost"), tuple((made, f"{loss:.3g}") for made, loss in others)))
    return ReportResult("Gate", verdict.to_json(), tables, exit_code=0 if verdict.passed else EXIT_MISFIT)


GATE = Report(gate, examples=("inspect gate", "inspect gate --json"))


# ---- audited answers ----


def audit(context: ReportContext) -> ReportResult:
    """Show how far the answers that `query --audit` has compared with full prefill were from it, by mode and level."""
    identity = context.identity
    audits = kept_audits(context.store, identity.fingerprint)
    if not audits:
        raise KvtoolError(
            f"no answer of {identity.model} from this store has been audited",
            '`kvtool query "…" --audit 1` audits one, KVTOOL_AUDIT=0.01 one of a hundred questions',
        )
    value = {"resolved": {"model": identity.model, "fingerprint": identity.fingerprint}} | audit_overview(audits)
    return ReportResult("Audit", value, [*_distances(value)])


def audit_overview(audits: Sequence[Audit]) -> dict[str, Any]:
    groups: dict[tuple[str, str, str], list[Audit]] = {}
    for audit in audits:
        groups.setdefault((audit.run, ", ".join(audit.levels), audit.lead_in), []).append(audit)
    return {
        "questions": len(audits),
        "since": min(audit.at for audit in audits),
        "until": max(audit.at for audit in audits),
        "runs": [_row(group) for group in sorted(groups.values(), key=lambda group: -len(group))],
    }


def _row(group: Sequence[Audit]) -> dict[str, Any]:
    cached = [audit.tokens["reused"] + audit.tokens["recomputed"] for audit in group]
    shares = [audit.tokens["recomputed"] / of for audit, of in zip(group, cached, strict=True) if of]
    worst = max(group, key=lambda audit: audit.kl_answer)
    return {
        "run": group[0].run,
        "levels": list(group[0].levels),
        "lead_in": group[0].lead_in,
        "count": len(group),
        **means([asdict(audit) for audit in group], DISTANCES),
        "spread": {name: quantiles([getattr(audit, name) for audit in group]) for name in ("kl_first", "kl_answer")},
        "sampled": sum(audit.sampled for audit in group),
        "incomplete": sum(audit.holes > 0 for audit in group),
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "worst": {"question": worst.question, "time": worst.at} | {name: getattr(worst, name) for name in DISTANCES},
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    import numpy as np

    points = np.percentile(values, [50, 90, 99, 100], method="inverted_cdf")
    return dict(zip(_SPREAD, map(float, points), strict=True))


def _distances(value: Mapping[str, Any]) -> Iterator[Shown]:
    yield Table(_HEAD, tuple(_cells(run) for run in value["runs"]))
    yield _when(value)
    sampled, holes = (sum(run[name] for run in value["runs"]) for name in ("sampled", "incomplete"))
    if sampled:
        yield f"sampled answers: {sampled}; `same answer` compares their greedy answers"
    if holes:
        yield f"prompts with chunks that were computed in place: {holes}; what they say of reuse is too good"


def _cells(run: Mapping[str, Any]) -> tuple[object, ...]:
    spreads = [f"{run['spread'][name][at]:.4f}" for name in ("kl_answer", "kl_first") for at in _SPREAD]
    return (
        *(run["run"], ", ".join(run["levels"]) or "-", run["lead_in"], run["count"], f"{run['recomputed_share']:.1%}"),
        *(*spreads, f"{run['top1_agrees']:.1%}", f"{run['answer_equal']:.1%}", run["worst"]["question"]),
    )


def _when(value: Mapping[str, Any]) -> str:
    since, until = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(value[at])) for at in ("since", "until"))
    return f"{counted(value['questions'], 'audit')}, {since if since == until else f'{since} to {until}'} UTC"


AUDIT = Report(audit, examples=("inspect audit", "inspect audit --html audit.html"))
