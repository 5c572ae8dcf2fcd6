"""Every run over a question file, beside full recompute: answers, distances, times, and how sure they are."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import known
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import GateError, KvtoolError
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.fusion.source import StoreSource
from kvtool.core.query.layout import lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.index import INDEX_FORMAT
from kvtool.core.retrieval.vectors import remembered
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.levels import ProfileShelf
from kvtool.core.session.session import Session
from kvtool.lab.measure.intervals import CONFIDENCE, RESAMPLES, interval, ratio_interval
from kvtool.lab.measure.journal import Journal
from kvtool.lab.measure.runs import RunSpec, ordered
from kvtool.lab.measure.trial import Row, Trial

Work = list[tuple[int, list[RunSpec]]]

_MEANS = (
    *("f1", "exact_match", "contains", "kl_first", "kl_answer", "top1_agrees", "answer_equal"),
    "bytes_read",
)
_COUNTS = ("recomputed", "fresh")  # of tokens in the prompt
_WITH_INTERVAL = ("f1", "contains", "kl_first", "kl_answer")


def evaluation_facts(
    store: Store, identity: StoreIdentity, requests: Sequence[Request], options: QueryOptions
) -> dict[str, Any]:
    """What results depend on besides the runs: equal facts, comparable results."""
    batch = json.dumps([asdict(request) for request in requests], ensure_ascii=False)
    return {
        "store": store.uuid,
        "model": identity.fingerprint,
        "lead_in": identity.lead_in.digest().hex(),
        "level": options.level,
        "max_loss": options.max_loss if options.level == "auto" else None,
        "batch": hashlib.sha256(batch.encode()).hexdigest(),
        "top_k": options.top_k,
        "retriever": [options.retriever, options.embedder or remembered(store), options.order, INDEX_FORMAT],
        "max_tokens": options.max_tokens,
    }


def open_work(requests: Sequence[Request], specs: Sequence[RunSpec], rows: Mapping[int, Mapping[str, Row]]) -> Work:
    """Questions that are not finished, by place, and the runs each still needs."""
    work = [(at, [spec for spec in specs if spec.name not in rows.get(at, {})]) for at in range(len(requests))]
    return [(at, missing) for at, missing in work if missing or at not in rows]


def evaluate(
    session: Session,
    requests: Sequence[Request],
    work: Work,
    options: QueryOptions,
    journal: Journal,
    warn: Warn = warn_nobody,
    advance: Callable[[int], None] = lambda questions: None,
) -> int:
    """Answer what is open and add each finished question to the journal, whose file must be held.

    The store stays as it is: holes are computed in place, for every run anew, and a warning names them. Returns and
    raises as :func:`answer_open` does.
    """
    source = StoreSource.of(session.store, session.decoder, ProfileShelf(session.store))

    def rows_of(at: int, missing: list[RunSpec]) -> dict[str, Row]:
        trial = Trial(session.decoder, source, lay_out(session, requests[at], options), options)
        rows = dict(trial.rows(missing))
        holes = max((row["holes"] for row in rows.values()), key=len)
        if holes:
            warn(
                f"question {name_of(requests, at)}: {len(holes)} chunk(s) were computed in place: {holes[0]}",
                "see `kvtool store verify`; its results say little about reuse",
            )
        return rows

    return answer_open(session, requests, work, options, journal, rows_of, warn, advance)


def answer_open(
    session: Session,
    requests: Sequence[Request],
    work: Work,
    options: QueryOptions,
    journal: Journal,
    rows_of: Callable[[int, list[RunSpec]], Mapping[str, Row]],
    warn: Warn,
    advance: Callable[[int], None],
) -> int:
    """Add what `rows_of` makes of each open question and its missing runs to the journal, whose file must be held.

    Returns
    -------
    How many questions failed; each was warned of, and is open still.

    Raises
    ------
    GateError : the gate refuses the model.
    """
    failed = 0
    if any(missing for _, missing in work) and not options.force:
        session.check_gate()
    for at, missing in work:
        try:
            rows = rows_of(at, missing)
        except GateError:
            raise
        except KvtoolError as error:
            failed += 1
            warn(f"question {name_of(requests, at)}: {error.message}", error.hint)
        else:
            journal.add(at, requests[at].id, rows)
        advance(1)
    return failed


def name_of(requests: Sequence[Request], at: int) -> str:
    """A question's id, or its number."""
    return requests[at].id or f"number {at + 1}"


# ---- over all questions ----


def summarise(rows: Mapping[int, Mapping[str, Row]]) -> list[dict[str, Any]]:
    """One summary a run: the reference first, then by mode and amount.

    Returns
    -------
    `run`, `count`; means (`f1`, `exact_match`, `contains` over questions with answers), `recomputed_share` of the
    cached rows, medians `ttft_ms_median` and `speedup`, `f1_ratio` = Σ F1 / Σ F1 of full on the same questions,
    `intervals` (95 %), `pareto`: no other run recomputes less and is nearer to full.
    """
    names = ordered({name for of_question in rows.values() for name in of_question})
    found = [_summary(name, [of for _, of in sorted(rows.items()) if name in of]) for name in names]
    for row in found:
        row["pareto"] = not any(_dominates(other, row) for other in found)
    return found


def levels_in(rows: Mapping[int, Mapping[str, Row]]) -> list[str]:
    """The levels at which any run read chunks, finest first: what a lossy one rounds away is part of its results."""
    return known(
        level for of_question in rows.values() for row in of_question.values() for level in row.get("levels", ())
    )


def overview(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, Any]:
    """The JSON of `inspect quality`."""
    return {
        "questions": len(rows),
        "with_holes": sum(any(row["holes"] for row in of_question.values()) for of_question in rows.values()),
        "reference": REFERENCE,
        "interval_confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "levels": levels_in(rows),
        "runs": summarise(rows),
    }


def _summary(name: str, questions: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    own = [of[name] for of in questions]
    row: dict[str, Any] = {"run": name, "count": len(own)}
    row |= {key: statistics.fmean(values) for key in _MEANS if (values := _values(own, key))}
    row |= {f"tokens_{key}": statistics.fmean(_values(own, key)) for key in _COUNTS}
    shares = [of["recomputed"] / cached for of in own if (cached := of["reused"] + of["recomputed"])]
    row["recomputed_share"] = statistics.fmean(shares) if shares else 0.0
    row["ttft_ms_median"] = statistics.median(_values(own, "ttft_ms"))
    row["speedup"] = statistics.median(_values(own, "speedup"))
    intervals = {key: interval(values) for key in _WITH_INTERVAL if (values := _values(own, key))}
    pairs = [(of[name]["f1"], of[REFERENCE]["f1"]) for of in questions if "f1" in of[name]]
    if pairs:
        mine, full = (list(side) for side in zip(*pairs, strict=True))
        row["f1_ratio"] = sum(mine) / sum(full) if sum(full) else None
        intervals["f1_ratio"] = ratio_interval(mine, full)
    return row | {"intervals": intervals}


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if key in row]


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether `a` is at least as good in both, and better in one."""
    mine, other = ((row["recomputed_share"], row["kl_answer"]) for row in (a, b))
    return mine != other and mine[0] <= other[0] and mine[1] <= other[1]
