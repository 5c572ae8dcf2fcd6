"""Summary of an evaluation, with intervals: runs next to full recompute, retrieval recall, choice of a run."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.levels import known
from kvtool.core.errors import UsageError
from kvtool.core.evaluate.measures import MEASURES, Row, means, numbers_of
from kvtool.core.fusion.selectors import REFERENCE, SELECTORS
from kvtool.reports.evaluation import by_run

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.finder import Places


RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_FEWEST = 2  # numbers that an interval is of: one says nothing of how others would be
_AT_ONCE = 1 << 21  # numbers

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]
Column = Sequence[float | None]  # a number of every question; None: it has none, and counts nowhere
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over the questions with its 95 % interval; None without data. A single question has no interval."""

    value: float | None
    interval: Interval | None


def difference(own: Column, other: Column) -> Column:
    return [None if a is None or b is None else a - b for a, b in zip(own, other, strict=True)]


def estimates(columns: Mapping[K, Column]) -> dict[K, Estimate]:
    """Estimate the mean of each column: percentile bootstrap (Efron & Tibshirani 1993, ch. 13), paired by question.

    A resample takes a question with all that was measured of it, so that what makes one question harder than another
    does not make the difference of two runs unsure. All means are drawn together, as one product of matrices.
    """
    if not columns or not len(next(iter(columns.values()))):
        return {key: Estimate(None, None) for key in columns}
    means = _resampled_means(list(columns.values())).T
    return {key: _estimate(row, column) for (key, column), row in zip(columns.items(), means, strict=True)}


def interval(values: Sequence[float]) -> Interval | None:
    """Estimate the 95 % interval of the mean over questions; None where there are fewer than two."""
    return estimates({"": values})[""].interval


def _estimate(resampled: Floats, column: Column) -> Estimate:
    count = sum(value is not None for value in column)
    if count < _FEWEST:
        return Estimate(float(resampled[0]) if count else None, None)
    known = resampled[1:][np.isfinite(resampled[1:])]
    low, high = np.percentile(known, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(resampled[0]), (float(low), float(high)))


def _resampled_means(columns: Sequence[Column]) -> Floats:
    """Return means over the questions and over every resample, `[1 + RESAMPLES, columns]`; NaN without a number."""
    values = np.array([[np.nan if value is None else value for value in column] for column in columns], np.float64).T
    known = np.isfinite(values)
    masks, which = np.unique(known, axis=1, return_inverse=True)  # most columns lack the same questions
    table = np.hstack([np.where(known, values, 0.0), masks])
    sums = np.concatenate([table.sum(0)[None], *(block.astype(np.float64) @ table for block in _draws(len(values)))])
    counts = sums[:, len(columns) :][:, which.ravel()]
    with np.errstate(invalid="ignore"):
        return np.where(counts > 0, sums[:, : len(columns)] / counts, np.nan)


def _draws(count: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield how often each resample has each question: `[resamples, count]`, in blocks; equal for equal counts."""
    random = np.random.default_rng(SEED)
    step = max(1, _AT_ONCE // count)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        placed = random.integers(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        yield np.bincount(placed.ravel(), minlength=rows * count).reshape(rows, count).astype(np.uint16)


_SCORES = ("f1", "contains")
_DISTANCES = ("kl_first", "kl_answer")

Rows = Mapping[int, Mapping[str, Row]]  # of each question by its place in the file, and of each run by its name
Questions = Sequence[Mapping[str, Row]]
Summary = dict[str, Any]


def summarise(rows: Rows, base: str = "") -> list[dict[str, Any]]:
    questions, of_run = [of_question for _, of_question in sorted(rows.items())], by_run(rows)
    names = ordered(of_run)
    estimated = compared(questions, names, base)
    summaries = [_summary(name, of_run[name], estimated[name]) for name in names]
    for summary in summaries:
        summary["pareto"] = not any(_dominates(other, summary) for other in summaries)
    return summaries


def overview(rows: Rows, base: str = "") -> dict[str, Any]:
    levels = (level for of_question in rows.values() for row in of_question.values() for level in row["levels"])
    return {
        "questions": len(rows),
        "incomplete": sum(any(row["holes"] for row in of_question.values()) for of_question in rows.values()),
        "reference": REFERENCE,
        "kl_base": base if any(base in of_question for of_question in rows.values()) else None,
        "interval_confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "levels": known(levels),
        "retrieval": retrieval_summary(rows),
        "runs": summarise(rows, base),
    }


def _summary(name: str, questions: Questions, estimated: Mapping[str, Estimate]) -> dict[str, Any]:
    rows = [question[name] for question in questions]
    shares = [row["recomputed"] / cached for row in rows if (cached := row["reused"] + row["recomputed"])]
    return {
        "run": name,
        "count": len(rows),
        **means(rows, (*MEASURES, "bytes_read")),
        **{f"tokens_{count}": mean for count, mean in means(rows, ("recomputed", "fresh")).items()},
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "ttft_ms_median": statistics.median(numbers_of(rows, "ttft_ms")),
        "speedup": statistics.median(numbers_of(rows, "speedup")),
        **{key: estimate.value for key, estimate in estimated.items()},
        "intervals": {key: estimate.interval for key, estimate in estimated.items()},
    }


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    costs, others = ((summary["recomputed_share"], summary["kl_answer"]) for summary in (a, b))
    return costs != others and costs[0] <= others[0] and costs[1] <= others[1]


def ordered(names: Iterable[str]) -> list[str]:
    modes = list(SELECTORS)

    def place(name: str) -> tuple[int, str, float]:
        variant, _, amount = name.partition(":")
        mode = variant.partition("+")[0]
        return modes.index(mode) if mode in modes else len(modes), variant, float(amount or 0)

    return sorted(names, key=place)


# ---- question by question ----


def compared(questions: Questions, names: Sequence[str], base: str = "") -> dict[str, dict[str, Estimate]]:
    """Estimate each run's measures, and its differences: of scores from full prefill, of distances from `base`."""
    columns: dict[tuple[str, str], Column] = {}
    for name in names:
        for key, other in (*((key, REFERENCE) for key in _SCORES), *((key, base) for key in _DISTANCES)):
            own = _column(questions, name, key)
            if any(value is not None for value in own):
                columns[name, key] = own
                if other in names and name not in (other, REFERENCE):
                    columns[name, f"{key}_difference"] = difference(own, _column(questions, other, key))
    found: dict[str, dict[str, Estimate]] = {name: {} for name in names}
    for (name, key), estimate in estimates(columns).items():
        found[name][key] = estimate
    return found


def _column(questions: Questions, name: str, key: str) -> Column:
    values = (question.get(name, {}).get(key) for question in questions)
    return [None if value is None else float(value) for value in values]


# ---- retrieval ----


def check_sources(places: Places, requests: Sequence[Request]) -> None:
    for name in dict.fromkeys(name for request in requests for name in request.sources):
        places.of_document(name)


def retrieval_recall(places: Places, asked: PromptLayout) -> dict[str, float]:
    """Measure retrieval of a question's expected sources; empty if it names none, or names its own chunks."""
    request = asked.request
    if not request.sources or request.documents or request.chunks:
        return {}
    best_first = [hit.passage.chunk_id for hit in sorted(asked.hits, key=lambda hit: -hit.score)]
    wanted = [_chunks_of(places, name) for name in request.sources]
    ranks = [at for at, chunk in enumerate(best_first, 1) if any(chunk in chunks for chunks in wanted)]
    there = [not chunks.isdisjoint(best_first) for chunks in wanted]
    return {"recall": statistics.fmean(there), "reciprocal_rank": 1 / ranks[0] if ranks else 0.0}


def _chunks_of(places: Places, name: str) -> set[bytes]:
    with suppress(UsageError):
        return {passage.chunk_id for passage in places.of_document(name)}
    return set()


def retrieval_summary(rows: Rows) -> dict[str, Any] | None:
    """Sum up :func:`retrieval_recall` over the questions that name sources; None if none does."""
    known = [question[REFERENCE] for _, question in sorted(rows.items()) if "recall" in question.get(REFERENCE, {})]
    if not known:
        return None
    columns = {name: numbers_of(known, name) for name in ("recall", "reciprocal_rank")}
    estimated = estimates(columns)
    return {
        "count": len(known),
        **{name: estimate.value for name, estimate in estimated.items()},
        "complete": statistics.fmean(recall == 1 for recall in columns["recall"]),
        "intervals": {name: estimate.interval for name, estimate in estimated.items()},
    }


# ---- choice of a run ----


def best(runs: Sequence[Summary], max_kl: float) -> dict[str, Any]:
    """Choose the cheapest run that is near enough; if none is, the nearest of all. No runs: None."""
    weighed = [run for run in runs if run["run"] != REFERENCE]
    near = [run for run in weighed if _is_near(run, max_kl)]
    cheapest = min(near, key=lambda run: (run["recomputed_share"], run["kl_answer"]), default=None)
    chosen = cheapest or min(weighed, key=lambda run: run["kl_answer"], default=None)
    return {"run": chosen and chosen["run"], "within_limit": cheapest is not None}


def _is_near(run: Summary, max_kl: float) -> bool:
    """A single question has no interval."""
    interval = run["intervals"]["kl_answer"]
    return interval is not None and interval[1] <= max_kl
