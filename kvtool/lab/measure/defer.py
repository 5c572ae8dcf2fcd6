"""How sure is sure enough: answers of every round of deferred loading beside what each threshold would have given."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.core.evaluate.measures import SCORES, Row, means
from kvtool.core.evaluate.scoring import score
from kvtool.core.fusion.engine import Fused, fuse
from kvtool.core.fusion.selectors import selector_for
from kvtool.core.model.generate import Sampling, generate
from kvtool.core.query.defer import PROBED, Threshold, confidence, judge
from kvtool.core.query.layout import PromptLayout, lay_out
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.query.rounds import probe, steps, text_of
from kvtool.core.session.session import Session
from kvtool.lab.measure.evaluation import RowsOf, by_run
from kvtool.lab.measure.intervals import interval
from kvtool.lab.measure.quality import levels_in
from kvtool.lab.measure.runs import RunSpec

ALLOWED_LOSS = 0.01  # of F1, and of the share of answers that contain a gold one, against one pass over all chunks
NEVER = 1.5  # a threshold that no confidence reaches: everything is loaded
_TRIED = (*(step / 20 for step in range(21)), NEVER)  # few, so that one that is good is less likely so by accident
_BINS = 10
_ANY = Threshold(0.0, "default")  # any confidence is enough: what is refused, is refused for its words


def defer_facts(options: QueryOptions) -> dict[str, Any]:
    """Tell what results of rounds depend on besides `evaluation_facts`."""
    return {"rounds": [options.defer_first, PROBED], "whole": True}


def rows_of_rounds(session: Session, specs: Mapping[str, RunSpec], options: QueryOptions) -> RowsOf:
    """Make what answers a question: each run after every round, and from one pass over all chunks."""
    _ = session.decoder  # whose context a prompt has to fit

    def rows_of(request: Request, names: Sequence[str]) -> Mapping[str, Row]:
        asked = lay_out(session, request, options)
        at_once = lay_out(session, request, replace(options, defer=False, min_score=0.0))
        return {name: _question(session, asked, at_once, specs[name], options) for name in names}

    return rows_of


def _question(
    session: Session, asked: PromptLayout, at_once: PromptLayout, spec: RunSpec, options: QueryOptions
) -> Row:
    """Answer after every round, as if it were the last, and from one pass over all chunks."""
    decoder, selector = session.decoder, selector_for(spec.options(options), spec.mode)
    source, answers = session.source, asked.request.answers
    rounds = [
        _row(session, step.fused, step.now.bytes_read, answers, options)
        for step in steps(decoder, asked.plan, selector, source, options)
    ]
    whole = fuse(decoder, at_once.plan, selector, source, options.max_tokens)
    answered = _row(session, whole, whole.bytes_read, answers, options)
    return {"rounds": rounds, "whole": answered, "levels": whole.plan.levels}


def _row(session: Session, fused: Fused, bytes_read: int, answers: Sequence[str], options: QueryOptions) -> Row:
    """Answer over a fused prompt, and tell how sure that begins and how it scores."""
    decoder = session.decoder
    begun = probe(decoder, fused, options.max_tokens)
    first, *more = begun.ids
    sampling = Sampling(options.max_tokens)
    said = generate(decoder, fused.cache, first, sampling, more=more).text.strip()
    return {
        "chunks": len(fused.plan.chunks),
        "confidence": confidence(begun.log_p),
        "refused": not judge(1.0, text_of(decoder, begun), _ANY).enough,
        "answer": said,
        "bytes_read": bytes_read,
        **score(said, answers).to_json(),
    }


# ---- over all questions ----


def defer_overview(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, Any]:
    """Make the JSON of `inspect quality --defer`: one entry a run, in `runs`; `levels` as in :func:`levels_in`.

    Returns
    -------
    `bins[{low, high, count, confidence, contains, interval}]`: first and middle rounds by confidence, and the share
    whose answer contains a gold one; `policies`: what thresholds from 0 to 1 give (see `policy`); `whole`: one pass
    over all chunks; `all`, `first`: all rounds, and the first alone; `threshold`, `chosen`: see `choose`;
    `held_out`: thresholds chosen on every other question and tried on the others, both ways.
    """
    runs = sorted(by_run(rows).items())
    return {
        "questions": len(rows),
        "probed": PROBED,
        "allowed_loss": ALLOWED_LOSS,
        "levels": levels_in(rows),
        "runs": [{"run": name} | _overview([question[name] for question in questions]) for name, questions in runs],
    }


def _overview(questions: Sequence[Row]) -> dict[str, Any]:
    threshold = choose(questions)
    return {
        "count": len(questions),
        "threshold": threshold,
        "chosen": policy(questions, threshold),
        "whole": _whole(questions),
        "all": policy(questions, NEVER),
        "first": policy(questions, -1.0),
        "held_out": _held_out(questions),
        "policies": [policy(questions, threshold) for threshold in _TRIED[:-1]],
        "bins": bins(questions),
    }


def policy(questions: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Tell what a threshold gives: means of the scores, the chunks loaded and the bytes read, and the share of bytes.

    Below 0 the first round is taken whatever it says.
    """
    return _means(threshold, [(rounds, _taken(rounds, threshold)) for rounds in _rounds(questions)])


def _rounds(questions: Sequence[Row]) -> list[Sequence[Row]]:
    return [question["rounds"] for question in questions]


def _whole(questions: Sequence[Row]) -> dict[str, Any]:
    """Average what one pass over all chunks gives."""
    return means([question["whole"] for question in questions], (*SCORES, "chunks", "bytes_read"))


def _means(threshold: float, taken: Sequence[tuple[Sequence[Row], int]]) -> dict[str, Any]:
    ends = [rounds[at] for rounds, at in taken]
    read = [sum(row["bytes_read"] for row in rounds[: at + 1]) for rounds, at in taken]
    everything = sum(row["bytes_read"] for rounds, _ in taken for row in rounds)
    return {
        "threshold": threshold,
        **means(ends, (*SCORES, "chunks")),
        "rounds": statistics.fmean(at + 1 for _, at in taken),
        "bytes_read": statistics.fmean(read),
        "bytes_share": sum(read) / everything if everything else 0.0,
    }


def _taken(rounds: Sequence[Row], threshold: float) -> int:
    """Find the round that a threshold stops at."""
    if threshold < 0:
        return 0
    enough = (at for at, row in enumerate(rounds) if row["confidence"] >= threshold and not row["refused"])
    return min(next(enough, len(rounds) - 1), len(rounds) - 1)


def choose(questions: Sequence[Row]) -> float:
    """Choose the lowest of a few thresholds that loses at most ALLOWED_LOSS of either score; if none does, the one that
    loses least.

    What it is held against is what a query without `--defer` gives: one pass over all chunks.
    """
    whole = _whole(questions)
    tried = {threshold: policy(questions, threshold) for threshold in _TRIED}
    losses = {
        threshold: round(max(whole[name] - given[name] for name in ("f1", "contains")), 9)
        for threshold, given in tried.items()
    }
    return min(_TRIED, key=lambda threshold: (max(losses[threshold], ALLOWED_LOSS), threshold))


def _held_out(questions: Sequence[Row]) -> dict[str, Any] | None:
    """Try on each half of the questions the threshold of the other; None where there are less than two."""
    halves = questions[::2], questions[1::2]
    if not all(halves):
        return None
    thresholds = [choose(half) for half in halves]
    taken = [
        (rounds, _taken(rounds, threshold))
        for half, threshold in zip(halves[::-1], thresholds, strict=True)
        for rounds in _rounds(half)
    ]
    return {"thresholds": thresholds} | {k: v for k, v in _means(0.0, taken).items() if k != "threshold"}


def bins(questions: Sequence[Row]) -> list[dict[str, Any]]:
    """Sort the rounds that something hung on by confidence; empty bins are left out."""
    by_bin: dict[int, list[Row]] = {}
    for row in (row for rounds in _rounds(questions) for row in rounds[:-1]):
        by_bin.setdefault(min(int(row["confidence"] * _BINS), _BINS - 1), []).append(row)
    return [
        {
            "low": number / _BINS,
            "high": (number + 1) / _BINS,
            "count": len(rows),
            **means(rows, ("confidence", "contains", "f1")),
            "interval": interval([row["contains"] for row in rows]),
        }
        for number, rows in sorted(by_bin.items())
    ]
